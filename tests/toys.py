"""Toy programs whose answers can be checked by hand, and a watch over what a program is fed.

`table` (F-TAB) looks the next token's logits up by the last token alone. `history` (F-HIST) sums over all slots it
sees, each token weighed by its position: a doubled, missing or misplaced token changes the answer. Both in float64.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from exgen import Program

VOCAB, SIZE = 23, 8
CPU = torch.device("cpu")


def table(logits: Tensor, **limits: Any) -> Program:
    """The next token's logits are `logits[token]`, of `[v, v]`."""

    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        tensors: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        return logits[input_ids[:, logits_at]], tensors

    return _program(step, lambda b, l: [], (), len(logits), **limits)


class History(nn.Module):
    """Contract of a step program, with one layer of keys `[b, 1, l, d]`; values are not used but written."""

    tokens: Tensor
    frequencies: Tensor
    out: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"tokens": (VOCAB, SIZE), "frequencies": (SIZE,), "out": (SIZE, VOCAB)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(*shape, generator=generator, dtype=torch.float64))

    def weigh(self, positions: Tensor) -> Tensor:
        return torch.cos(positions[..., None].double() * self.frequencies + self.frequencies)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        rows = torch.arange(input_ids.shape[0])[:, None]
        slot_positions[rows, slots] = position_ids
        keys[0][rows, 0, slots] = self.tokens[input_ids]
        values[0][rows, 0, slots] = position_ids[..., None].double()
        read = keys[0][:, 0] * self.weigh(slot_positions)  # [b, l, d]
        seen = visible[:, logits_at].double() @ read.narrow(1, 0, visible.shape[2])  # [b, n, d]
        return torch.tanh(seen) @ self.out * 2


def history(free_slots: bool = True, **limits: Any) -> Program:
    """`History` as a program. Without `free_slots` it has no mask: it sees its slots in order, up to the token fed."""
    module = History()

    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        tensors: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        if not free_slots:
            every = torch.arange(tensors[0].shape[2])
            slot_positions = every.expand(len(input_ids), -1).clone()
            visible = every <= position_ids[:, :, None]
            assert torch.equal(slots, position_ids), "a program without a mask is fed slots in order"
        logits = module(input_ids, position_ids, slots, visible, logits_at, slot_positions, tensors[:1], tensors[1:])
        return logits, tensors

    def empty(b: int, l: int) -> list[Tensor]:
        return [torch.zeros(b, 1, l, SIZE, dtype=torch.float64), torch.zeros(b, 1, l, 1, dtype=torch.float64)]

    return _program(step, empty, (2, 2), VOCAB, free_slots=free_slots, **limits)


def exported_history() -> ExportedProgram:
    """`History` as an `ExportedProgram` of the step contract."""
    ids = [torch.zeros(3, 5, dtype=torch.long) for _ in range(3)]
    visible = torch.ones(3, 5, 11, dtype=torch.bool)
    state = (torch.zeros(3, 13, dtype=torch.long), *([torch.zeros(3, 1, 13, d).double()] for d in (SIZE, 1)))
    b, s, m, l, n = (Dim(name, min=1) for name in "bsmln")
    tokens = {0: b, 1: s}
    sizes = (tokens, tokens, tokens, {0: b, 1: s, 2: m}, {0: n}, {0: b, 1: l}, [{0: b, 2: l}], [{0: b, 2: l}])
    inputs = (*ids, visible, torch.zeros(2, dtype=torch.long), *state)
    exported = torch.export.export(History(), inputs, dynamic_shapes=sizes, strict=False)
    metadata = {"format": 2, "keys": [[1, SIZE]], "values": [[1, 1]], "dtype": "float64", "vocab_size": VOCAB}
    metadata |= {"max_positions": None, "windows": [None], "generation_config": {}, "model_type": "history"}
    exported.graph_module.meta.setdefault("custom", {})["exgen"] = json.dumps(metadata)
    return exported


def history_oracle(prompt: list[int], new: int) -> list[int]:
    """What greedy decoding of `history` adds to `prompt`, each token computed from the whole text, without a cache."""
    module, text = History(), list(prompt)
    for _ in range(new):
        read = module.tokens[text] * module.weigh(torch.arange(len(text)))
        text.append(int((torch.tanh(read.sum(0)) @ module.out).argmax()))
    return text[len(prompt) :]


class Call(NamedTuple):
    """What one call of a program's `step` was fed."""

    shape: tuple[int, int]  # b, s
    tokens: Tensor  # [b, s]
    positions: Tensor  # [b, s]
    slots: Tensor  # [b, s]
    held: int  # l: slots of the cache


def watched(program: Program, during: Callable[[], None] = lambda: None) -> tuple[Program, list[Call]]:
    """`program`, and the calls that it gets from now on; `during` runs inside each of them."""
    calls: list[Call] = []

    def step(*inputs: Any) -> tuple[Tensor, list[Tensor]]:
        tokens, positions, slots, visible, *_ = inputs
        during()
        calls.append(Call(tuple(tokens.shape), tokens.clone(), positions.clone(), slots.clone(), visible.shape[2]))
        return program.step(*inputs)

    return program._replace(step=step), calls


def _program(
    step: Callable[..., Any],
    empty: Callable[[int, int], list[Tensor]],
    slot_axes: tuple[int, ...],
    v: int,
    **limits: Any,
) -> Program:
    fields = {"free_slots": True, "max_slots": None, "max_feed": None, "max_positions": None} | limits
    return Program(step, empty, slot_axes, vocab_size=v, generation_config={}, device=CPU, **fields)
