"""export.py: make a *step program* of a decoder-only transformers model, a pure function that is handed its cache.

    program = export_for_generation(model)              # a torch.export.ExportedProgram
    torch.export.save(program, "model.pt2")             # loads and runs without the model's code
    logits = program.module()(input_ids, position_ids, slots, visible, logits_at, slot_positions, keys, values)

Axes: `b` rows, `s` tokens fed, `l` cache slots, `m` of them in use, `h` key/value heads, `d` head size, `n` logits
asked for, `v` vocabulary. `b`, `s`, `l`, `m` and `n` are dynamic.

    input_ids, position_ids  [b, s]      the tokens to feed, each one's position in its own sequence
    slots                    [b, s]      the cache slot each token writes its key and value to
    visible                  [b, s, m]   which of the first m <= l slots each token may attend to, its own included
    logits_at                [n]         which of the s tokens to compute logits for
    slot_positions           [b, l]      mutated: the position of the token held in each slot
    keys, values             lists of [b, h, l, d], one per layer that attends, mutated
    states                   list of [b, ...], mutated: what other layers keep, as convolutions and recurrences do
    returns                  [b, n, v]   logits

`visible` alone says what is causal and what is padding. The graph only narrows it by the model's own windows and
chunks, which it computes from positions, so slots can be used in any order. What a call costs follows `m`, not `l`.

A program without states does not have that argument. One with them takes a token at a time (`s` and `n` are 1), in
order and without padding, as states hold all that came before.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters
from torch._inductor.package import package_aoti
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.utils import logging

SLOTS = "exgen_slots"  # transformers finds our attention and masks under this name, only while a model runs
# How a model may be brought to attend through slots, best first: with which attention, given which attention_mask.
WAYS = tuple(product((SLOTS, "sdpa", "eager"), ("no", "a counted", "a whole")))


CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the first since transformers 5


class CacheShape(NamedTuple):
    keys: list[tuple[int, int]]  # (h, d) of each layer that attends, then of each that looks slots up by other keys
    values: list[tuple[int, int]]
    dtype: torch.dtype
    device: torch.device
    states: list[tuple[list[int], str]]  # [...] of each state `[b, ...]`, and its dtype


class Places(NamedTuple):
    """Where a model's layers find what they keep."""

    attending: list[int]  # the layer of each of `keys`
    indexing: list[int]  # and of each further one
    states: list[tuple[int, str, int]]  # of each of `states`: its layer, kind and number there


class Feed(NamedTuple):
    """What attention needs of a step program's arguments."""

    position_ids: Tensor
    slots: Tensor
    visible: Tensor
    slot_positions: Tensor  # of the first m slots
    keys: list[Tensor]
    values: list[Tensor]
    states: list[Tensor]


def export_for_generation(model: PreTrainedModel) -> ExportedProgram:
    """`model` as a step program that shares its weights, with metadata in `graph_module.meta["custom"]["exgen"]`.

    `model` is left as it was. The program's logits are compared with the model's own before it is returned, under the
    attention implementation that the model came with (sdpa of transformers 4.57 leaves out gemma2's softcap)."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise TypeError(f"export_for_generation got {type(model).__name__}: give it a decoder-only transformers model")
    model = with_plain_weights(model)
    config = model.config.get_text_config()
    max_positions = getattr(config, "max_position_embeddings", None)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (2, min(40, max_positions or 40)), generator=generator).to(model.device)
    with torch.no_grad(), prepared(model, None):
        logits, shape, places = run_eager(model, prompts)
        step = agreeing_step(model, prompts, logits, shape, places)
    windows = [step.windows.get(layer) for layer in places.attending]
    with torch.no_grad(), prepared(model, step.attention):
        program = simplified(traced(step, shape, (3, 1, 11, 1) if shape.states else (3, 5, 11, 2)))
        ask_early(program.graph)
        program.graph_module.recompile()
        require_agreement(program.module(check_guards=False), prompts, logits, shape)
    metadata = {
        "format": 2,
        "keys": shape.keys,
        "values": shape.values,
        "states": shape.states,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "vocab_size": logits.shape[-1],
        "max_positions": max_positions,
        "windows": windows,
        "generation_config": model.generation_config.to_diff_dict() if model.generation_config else {},
        "model_type": model.config.model_type,
    }
    program.graph_module.meta.setdefault("custom", {})["exgen"] = json.dumps(metadata)
    return program


def with_plain_weights(model: PreTrainedModel) -> PreTrainedModel:
    """`model`; or if it holds tensors in parts, as torchao's quantised ones, a copy that shares these parts as weights.

    A program is saved and loaded with plain tensors only, so that it needs no library but torch.
    """
    weights = [*model.parameters(), *model.buffers()]
    if not any(is_traceable_wrapper_subclass(weight) for weight in weights):
        return model
    return unwrap_tensor_subclass_parameters(copy.deepcopy(model, {id(weight): weight for weight in weights}))


def agreeing_step(model: PreTrainedModel, prompts: Tensor, logits: Tensor, shape: CacheShape, places: Places) -> "Step":
    """The first of WAYS whose logits are the model's own."""
    failures: dict[str, str] = {}
    for attention, mask in WAYS:
        step = Step(model, attention, mask, places)
        try:
            with prepared(model, attention):
                require_agreement(step, prompts, logits, shape)
            return step
        except Exception as error:  # a model's code can fail in any way when its attention is replaced
            failures.setdefault(first_line(error), f"{attention} attention and {mask} mask")
    reasons = "".join(f"\n- with {way}: {reason}" for reason, way in failures.items())
    raise ValueError(f"{type(model).__name__} cannot be made a step program with logits of its own:{reasons}")


class Step(nn.Module):
    """The step program before it is traced."""

    def __init__(self, model: PreTrainedModel, attention: str, mask: str, places: Places) -> None:
        super().__init__()
        self.model, self.attention, self.mask, self.places = model, attention, mask, places
        self.knows_softcap = model.config._attn_implementation != "sdpa"
        self.accepts = set(inspect.signature(model.forward).parameters)
        self.windows: dict[int, int | None] = {}

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
        states: list[Tensor] | None = None,
    ) -> Tensor:
        slot_positions[rows_of(slots), slots] = position_ids
        used = slot_positions.narrow(1, 0, visible.shape[2])
        cache = SlotCache(Feed(position_ids, slots, visible, used, keys, values, states or []), self)
        arguments: dict[str, Any] = {"position_ids": position_ids, "logits_to_keep": logits_at}
        arguments |= dict.fromkeys(CACHE_NAMES, cache)
        counting: Any = nullcontext()
        if self.mask == "a counted":
            arguments["attention_mask"] = torch.ones_like(used)
            counting = PositionsByCounting(arguments["attention_mask"], used)
        if self.mask == "a whole":
            arguments["attention_mask"] = cache.plain_mask()
        arguments = {name: value for name, value in arguments.items() if name in self.accepts}
        with registered(cache, self.attention), counting:
            logits = self.model(input_ids=input_ids, use_cache=True, return_dict=True, **arguments).logits
        self.windows = cache.windows
        return logits if "logits_to_keep" in self.accepts else logits[:, logits_at]


class SlotCache(Cache):
    """One step's cache. The model's keys and values are written at `slots`, and it is answered with those of all slots;
    masks and attention then work on slots too."""

    def __init__(self, feed: Feed, step: Step) -> None:
        self.feed, self.model, self.knows_softcap = feed, step.model, step.knows_softcap
        self.index = {layer: i for i, layer in enumerate(step.places.attending)}
        self.indexers = dict(zip(step.places.indexing, feed.keys[len(self.index) :], strict=True))
        self.states = dict(zip(step.places.states, feed.states, strict=True))
        self.layers: list[Any] = []  # what transformers' own methods look at
        self.layer = 0  # the one at work
        self.rows = rows_of(feed.slots)
        self.windows: dict[int, int | None] = {}  # by layer
        self.masks: dict[int, tuple[Tensor, int | None]] = {}  # by id: the mask itself and its window
        self.folded: dict[tuple[int, int], Tensor] = {}  # by id of the mask and number of groups

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.layer = layer_idx
        keys, values = self.feed.keys[self.index[layer_idx]], self.feed.values[self.index[layer_idx]]
        # These become index_put_; scatter_, once compiled, would clone the cache at every step.
        keys[self.rows, :, self.feed.slots] = key_states.transpose(1, 2)
        values[self.rows, :, self.feed.slots] = value_states.transpose(1, 2)
        return self.used(keys), self.used(values)

    def used(self, slots: Tensor) -> Tensor:
        """The first `m` of keys or values `[b, h, l, d]`."""
        return slots.narrow(2, 0, self.feed.visible.shape[2])

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """Keys `[b, s, d]` by which a layer chooses the slots it attends to; answered with those of all slots."""
        keys = self.indexers[layer_idx]
        keys[self.rows, 0, self.feed.slots] = indexer_key_states
        return self.used(keys)[:, 0]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return True  # before the first token, zeros

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False  # of states, the last alone is kept

    def get_recurrent_states_to_keep(self, *_: Any, **__: Any) -> int:
        return 0

    def increase_count(self, *_: Any, **__: Any) -> None:
        pass  # positions are given

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states[layer_idx, "conv_states", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states[layer_idx, "recurrent_states", state_idx]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The inputs before the new ones, and these; `[b, channels, kernel + s]`. The last are kept."""
        held = self.get_conv_state(layer_idx, state_idx)
        inputs = torch.cat([held, conv_states], dim=-1)
        held.copy_(inputs[..., -held.shape[-1] :])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self.get_recurrent_state(layer_idx, state_idx).copy_(recurrent_states)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        # Positions are given, so the cache's length serves nothing, except attention that scales queries by how far
        # they are (llama4 past 8,192 tokens): it adds its layer's length to 0..s, for all rows alike. Row 0 answers.
        if layer_idx is None:
            return 0
        return self.feed.position_ids[0] - torch.arange(self.feed.slots.shape[1], device=self.rows.device)

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.feed.visible.shape[2], 0

    def mask(
        self, *_: Any, mask_function: Callable, dtype: torch.dtype, local_size: int | None = None, **__: Any
    ) -> Tensor:
        """transformers' mask function, called once per kind of layer: `[b, 1, s, m]`, to be added to the scores."""
        allowed = self.feed.visible[:, None]
        if mask_function is not causal_mask_function:
            rows = self.rows[:, :, None, None]
            queries, slots = self.feed.position_ids[:, None, :, None], self.feed.slot_positions[:, None, None, :]
            allowed = allowed & mask_function(rows, torch.zeros_like(rows), queries, slots)
        # The least number instead of -inf: padding that sees nothing must not become NaN.
        mask = torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)
        self.masks[id(mask)] = mask, local_size
        return mask

    def plain_mask(self, *_: Any, **__: Any) -> Tensor:
        """`visible` alone, for models that do not say what else they mask; right unless they have a window."""
        config = self.model.config.get_text_config()
        for name in ("sliding_window", "window_size", "attention_window", "attention_chunk_size"):
            if getattr(config, name, None):
                raise ValueError(f"{name} is {getattr(config, name)}, and its mask cannot be asked of the model")
        return self.mask(mask_function=causal_mask_function, dtype=self.model.dtype)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query `[b, h * g, s, d]`, answer `[b, s, h * g, d]`.

        The groups are folded into the queries, so that keys and values need not be copied `g` times."""
        g = query.shape[1] // key.shape[1]
        mask = self.folded_mask(self.plain_mask() if attention_mask is None else attention_mask, g)
        query = rearrange(query, "b (h g) s d -> b h (s g) d", g=g)
        softcap = softcap if self.knows_softcap else None
        if softcap is None and s_aux is None:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        else:
            scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap) + mask
            if s_aux is not None:  # a learned score per head, which takes its share of the weights and gives nothing
                sinks = repeat(s_aux, "(h g) -> b h (s g) 1", g=g, b=query.shape[0], s=query.shape[2] // g)
                scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
            weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
            attended = weights[..., : key.shape[2]] @ value
        return rearrange(attended, "b h (s g) d -> b s (h g) d", g=g), None

    def folded_mask(self, mask: Tensor, g: int) -> Tensor:
        """`mask` for queries with their groups folded in; all layers of a kind share it."""
        self.windows[self.layer] = self.masks.setdefault(id(mask), (mask, None))[1]
        if (id(mask), g) not in self.folded:
            one_for_all = mask.shape[1] == 1  # else one per head, as with ALiBi
            pattern = "b h s m -> b h (s g) m" if one_for_all else "b (h g) s m -> b h (s g) m"
            self.folded[id(mask), g] = (repeat if one_for_all else rearrange)(mask, pattern, g=g)
        return self.folded[id(mask), g]


def rows_of(slots: Tensor) -> Tensor:
    return torch.arange(slots.shape[0], device=slots.device)[:, None]  # [b, 1]


class PositionsByCounting(TorchFunctionMode):
    """Models with ALiBi find positions by counting the padding mask, `mask.cumsum(-1) - 1`. Slots may be in any order,
    so that count is answered with the true positions."""

    def __init__(self, mask: Tensor, slot_positions: Tensor) -> None:
        super().__init__()
        self.mask, self.slot_positions = mask, slot_positions

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (Tensor.cumsum, torch.cumsum) and args[0] is self.mask:
            return self.slot_positions + 1
        answer = func(*args, **(kwargs or {}))
        if func is Tensor.to and args[0] is self.mask and answer.dtype == self.mask.dtype:
            self.mask = answer
        return answer


@contextmanager
def registered(cache: SlotCache, attention: str) -> Iterator[None]:
    """Let transformers find `cache`'s masks and, for SLOTS, its attention under the name `attention`."""
    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = masks.get(attention)
    # Models of 4.57 that do not ask the mask interface build their mask in a method of this name.
    method = "_prepare_4d_causal_attention_mask_with_cache_position"
    old_style = [module for module in cache.model.modules() if hasattr(type(module), method)]
    try:
        masks[attention] = cache.mask
        if attention == SLOTS:
            attentions[SLOTS] = cache.attend
        for module in old_style:
            module.__dict__[method] = cache.plain_mask
        yield
    finally:
        attentions.pop(SLOTS, None)
        masks.pop(attention)
        if before is not None:
            masks[attention] = before
        for module in old_style:
            module.__dict__.pop(method, None)


@contextmanager
def prepared(model: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """`model` in eval mode with this attention implementation (None: its own), and afterwards as it was."""
    owners = [module for module in model.modules() if isinstance(getattr(module, "config", None), PretrainedConfig)]
    found = {id(owner.config): owner.config for owner in owners}
    found |= {id(x): x for config in found.values() for x in vars(config).values() if isinstance(x, PretrainedConfig)}
    before = [(config, dict(vars(config))) for config in found.values()]
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for config in found.values():
            config._attn_implementation_internal = attention or config._attn_implementation_internal
            if getattr(config, "_experts_implementation_internal", None) == "eager":
                config._experts_implementation_internal = "grouped_mm"  # eager loops over the experts in use
        yield
    finally:
        for config, attributes in before:
            vars(config).clear()
            vars(config).update(attributes)
        for module, mode in training:
            module.training = mode


def run_eager(model: PreTrainedModel, prompts: Tensor) -> tuple[Tensor, CacheShape, Places]:
    """The model's own logits `[b, t, v]`, and what is in the cache that it filled."""
    output = model(input_ids=prompts, use_cache=True, return_dict=True)
    cache = next((output[name] for name in CACHE_NAMES if output.get(name) is not None), None)
    layers = list(getattr(getattr(cache, "self_attention_cache", cache), "layers", []))
    attending = [i for i, layer in enumerate(layers) if isinstance(getattr(layer, "keys", None), Tensor)]
    found = {
        (i, kind, number): state
        for i, layer in enumerate(layers)
        for kind in ("conv_states", "recurrent_states")
        for number, state in (getattr(layer, kind, None) or {}).items()
        if isinstance(state, Tensor)
    }
    if not layers or {*range(len(layers))} != {*attending, *(i for i, _, _ in found)}:
        name, kind = type(model).__name__, type(cache).__name__
        raise ValueError(
            f"{name} keeps other states ({kind}) than are supported: keys, values, conv_states, recurrent_states"
        )
    keys, values = ([getattr(layers[i], part).shape for i in attending] for part in ("keys", "values"))
    indexing = [i for i, layer in enumerate(layers) if isinstance(getattr(layer, "indexer_keys", None), Tensor)]
    shape = CacheShape(
        [(size[1], size[3]) for size in keys] + [(1, layers[i].indexer_keys.shape[2]) for i in indexing],
        [(size[1], size[3]) for size in values],
        layers[attending[0]].keys.dtype if attending else output.logits.dtype,
        prompts.device,
        [(list(state.shape[1:]), str(state.dtype).removeprefix("torch.")) for state in found.values()],
    )
    return output.logits, shape, Places(attending, indexing, list(found))


def empty_cache(shape: CacheShape, b: int, l: int) -> tuple[Any, ...]:
    """slot_positions, keys, values, and states where there are any."""
    options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    keys, values = ([torch.zeros(b, h, l, d, **options) for h, d in heads] for heads in (shape.keys, shape.values))
    states = [torch.zeros(b, *size, dtype=getattr(torch, name), device=shape.device) for size, name in shape.states]
    slot_positions = torch.zeros(b, l, dtype=torch.long, device=shape.device)
    return slot_positions, keys, values, *([states] if states else [])


def traced(
    step: nn.Module, shape: CacheShape, example: tuple[int, int, int, int] = (3, 5, 11, 2), least: int = 1
) -> ExportedProgram:
    """`step` as a program for any sizes `b, s, m, n`, of which there are `example` values, and `least` tokens `s`."""
    # Sizes of 0 and 1 would be built into the graph, and so would two that are equal.
    rows, tokens, used, asked = example
    slots = used + 2
    cache = empty_cache(shape, rows, slots)
    ids = [torch.zeros(rows, tokens, dtype=torch.long, device=shape.device) for _ in range(3)]
    visible = torch.ones(rows, tokens, used, dtype=torch.bool, device=shape.device)
    logits_at = torch.zeros(asked, dtype=torch.long, device=shape.device)
    lower = zip("bsmn", example, (1, least, 1, 1), strict=True)
    b, s, m, n = (Dim.STATIC if size == 1 else Dim(name, min=low) for name, size, low in lower)
    l = Dim("l", min=1)
    token, slot, state = {0: b, 1: s}, {0: b, 2: l}, {0: b}
    sizes: list[Any] = [token, token, token, {0: b, 1: s, 2: m}, {0: n}, {0: b, 1: l}]
    sizes += [[slot] * len(shape.keys), [slot] * len(shape.values), [state] * len(shape.states)][: len(cache) - 1]
    failure: Exception
    for open_ended in (False, True):
        try:
            # Rotary embeddings of 4.57 switch autocast off, which would be kept in the graph as a call of a sub-graph.
            autocast: Any = patch("torch.autocast", lambda *_, **__: nullcontext())
            minimum: Any = patch("builtins.min", symbolic_min) if open_ended else nullcontext()
            with autocast, minimum:
                return torch.export.export(
                    step,
                    (*ids, visible, logits_at, *cache),
                    dynamic_shapes=tuple(sizes),
                    strict=False,
                    # what must hold of the sizes is checked when the program runs, not taken for granted
                    prefer_deferred_runtime_asserts_over_guards=open_ended,
                )
        except Exception as error:
            failure = error
    name = type(getattr(step, "model", step)).__name__
    raise ValueError(f"torch.export cannot trace {name}: {first_line(failure)}") from failure


def symbolic_min(*values: Any, least: Callable[..., Any] = min, **options: Any) -> Any:
    """`min` that leaves open which of two sizes is less, as of all slots and those that sparse attention takes."""
    if len(values) == 2 and any(isinstance(value, torch.SymInt) for value in values):
        return torch.sym_min(*values)
    return least(*values, **options)


def simplified(program: ExportedProgram) -> ExportedProgram:
    """Drop the nodes that take time and change nothing, and let no weight ask for gradients."""
    aten = torch.ops.aten
    identities = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.slice.Tensor, aten.expand.default)
    for node in program.graph.nodes:
        if node.target == aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
        elif any(user.op == "output" for user in node.users):
            continue  # the program's signature names what is returned
        elif node.target == aten.dropout.default or (node.target in identities and alike(node, node.args[0])):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    # The example had fewer slots in use than there were, and torch would hold every call to that.
    program._guards_code = [guard for guard in program._guards_code if "!=" not in guard]
    for name, weight in program.state_dict.items():
        program.state_dict[name] = nn.Parameter(weight.detach(), requires_grad=False)
    return program


def ask_early(graph: Graph) -> None:
    """Compute for the tokens `logits_at` alone what serves nothing but their logits: the end of the last layer.

    The graph picks these tokens just before its head. Picking and computing token by token can change places, which
    this does from the head upwards, as far as nothing else needs the other tokens. 3% of reading a prompt of SmolLM2.
    """
    logits_at = next(node for node in graph.nodes if node.op == "placeholder" and node.name == "logits_at")
    picked: dict[Node, Node] = {}  # by what they pick from

    def pick(x: Node) -> Node:
        if x not in picked:
            with graph.inserting_after(x):
                picked[x] = call(graph, torch.ops.aten.index.Tensor, (x, [None, logits_at]), {})
        return picked[x]

    for node in list(reversed(graph.nodes)):
        if node.target is torch.ops.aten.index.Tensor and node.args[1] == [None, logits_at]:
            picked.setdefault(node.args[0], node)
        early = picked.get(node)
        if early is None or set(node.users) != {early} or (by_token := inputs_by_token(node)) is None:
            continue
        with graph.inserting_before(early):
            arguments = map_arg((node.args, node.kwargs), lambda x: pick(x) if x in by_token else x)
            early.replace_all_uses_with(call(graph, node.target, *arguments))
        for dead in (early, node):
            graph.erase_node(dead)


def inputs_by_token(node: Node) -> list[Node] | None:
    """The inputs `[b, s, ...]` of a node that computes each token of its answer `[b, s, ...]` from the same one's."""
    aten, shape = torch.ops.aten, lambda x: tuple(map(str, x.meta["val"].shape))
    tensors = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
    size = shape(node) if isinstance(node.meta.get("val"), Tensor) else ()
    args: Any = node.args
    if len(size) != 3:
        return None
    if node.target in (aten.linear.default, aten.layer_norm.default, aten.rms_norm.default):
        plain = node.target is aten.linear.default or len(args[1]) == 1
        return tensors[:1] if plain and shape(tensors[0])[:2] == size[:2] else None
    if node.target is aten.mean.dim:
        return tensors if args[1:] == ([-1], True) else None
    casts = (aten.to.dtype, aten.type_as.default)
    if node.target not in casts and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    same = [x for x in tensors if len(shape(x)) == 3 and shape(x)[1] == size[1]]
    spread = all(len(shape(x)) < 2 or shape(x)[-2] == "1" for x in tensors if x not in same)
    return same if spread else None


def call(graph: Graph, target: Any, args: Any, kwargs: Any) -> Node:
    """A new node, with the sizes of its answer."""
    node = graph.call_function(target, args, kwargs)
    values = map_arg((args, kwargs), lambda x: x.meta["val"])
    example: Any = next(x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta["val"], Tensor))
    with example.fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def alike(a: Any, b: Any) -> bool:
    x, y = a.meta["val"], b.meta["val"]  # shapes as text: comparing symbols would make them equal
    return x.dtype == y.dtype and x.device == y.device and str(x.shape) == str(y.shape)


def require_agreement(step: Callable[..., Tensor], prompts: Tensor, logits: Tensor, shape: CacheShape) -> None:
    """Feed `prompts` [b, t] in two parts, the second row shifted by padding, to slots in random order, and compare."""
    b, t = prompts.shape
    columns = torch.arange(t)
    starts = torch.arange(b)[:, None] * (2 if t > 4 and not shape.states else 0)  # [b, 1]
    position_ids = (columns - starts).clamp(min=0)  # [b, t]
    generator = torch.Generator().manual_seed(0)
    slots = torch.stack([torch.randperm(t + 7, generator=generator)[:t] for _ in range(b)])
    sees = ((columns <= columns[:, None]) & (columns >= starts[:, None])) | torch.eye(t, dtype=torch.bool)  # [b, t, t]
    visible = torch.zeros(b, t, t + 7, dtype=torch.bool).scatter_(2, slots[:, None].expand(b, t, t), sees)
    position_ids, slots, visible = (x.to(shape.device) for x in (position_ids, slots, visible))
    cache = empty_cache(shape, b, t + 7)
    parts = []
    for part in [slice(i, i + 1) for i in range(t)] if shape.states else [slice(0, t // 2), slice(t // 2, t)]:
        feed = [x[:, part] for x in (prompts.gather(1, position_ids), position_ids, slots, visible)]
        parts.append(step(*feed, torch.arange(feed[0].shape[1], device=shape.device), *cache))
    real = (columns >= starts).to(shape.device)
    answer = torch.cat(parts, dim=1)[real].double()
    wanted = logits[torch.arange(b, device=shape.device)[:, None], position_ids][real].double()
    difference = (answer - wanted).norm() / wanted.norm()
    # Right models measure 1e-6 in float32; those of 16 bits round differently in each implementation.
    if not difference <= (1e-4 if shape.dtype in (torch.float32, torch.float64) else 0.1):
        largest = (answer - wanted).abs().max()
        raise ValueError(f"logits differ from the model's own by {largest:.3g}, relatively by {difference:.2g}")


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def compile_for_generation(exported: ExportedProgram, path: str | Path) -> Path:
    """Compile a step program for this machine's CPU into an AOTInductor package at `path`; it takes minutes.

    The package has an entry point for each number of tokens in a call (ENTRIES) over one copy of the weights. No kernel
    is chosen by timing, so a busy machine compiles the same package as an idle one. Raises `ValueError` for a program
    that `export_for_generation` did not make, or a `path` that does not end in `.pt2`.
    """
    text = exported.graph_module.meta.get("custom", {}).get("exgen")
    if text is None:
        raise ValueError("this program is no step program: make one with exgen.export_for_generation")
    if Path(path).suffix != ".pt2":
        raise ValueError(f"path is {path}: AOTInductor packages end in .pt2")
    metadata = json.loads(text)
    device = next(iter(exported.state_dict.values())).device
    if metadata.get("states"):
        raise ValueError("programs with states other than keys and values cannot be compiled yet: use them as they are")
    shape = CacheShape(metadata["keys"], metadata["values"], getattr(torch, metadata["dtype"]), device, [])
    files: dict[str, Any] = {}
    for name, entry in logging.tqdm(ENTRIES.items(), desc="compiling", unit="entry point"):
        module = exported.module(check_guards=False)
        replace_linears(module, entry.at_once)
        replace_attention(module, in_pieces=entry.least == LEAST_PROMPT)
        with torch.no_grad():
            program = traced(module, shape, entry.example, entry.least)
        options = OPTIONS | {"aot_inductor.metadata": {"exgen": text}}
        arguments = program.example_inputs
        files[name] = torch._inductor.aot_compile(program.module(check_guards=False), *arguments, options=options)
    package_aoti(str(path), files)
    return Path(path)


class Entry(NamedTuple):
    """One entry point of a package."""

    example: tuple[int, int, int, int]  # b, s, m, n that its loops are laid out for; sizes of 1 are built in
    at_once: int  # most tokens of a call, for which linear layers read their weights once; 0: any
    least: int = 1  # tokens `s`; from LEAST_PROMPT on, attention is computed in pieces


PIECES = 4  # of a prompt's tokens, each of which attends to the slots it can see
LEAST_PROMPT = 64
ENTRIES = {
    "one": Entry((1, 1, 300, 1), 1),
    "few": Entry((3, 5, 300, 2), 6),
    "many": Entry((2, 256, 640, 3), 0),
    "prompt": Entry((2, 256, 640, 3), 0, LEAST_PROMPT),
}

# The entry points are compiled without their weights; the package holds them once, for all, when it is opened.
OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "cpp.dynamic_threads": True,
    "cpp.enable_floating_point_contract_flag": "fast",  # a product and a sum in one instruction
}


def replace_linears(module: GraphModule, at_once: int) -> None:
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.mm.default and (weight := quantised_weight(node.args[1])):
            node.args = (node.args[0], weight)
        elif node.target is not torch.ops.aten.linear.default:
            continue
        node.target = streamed_linear if at_once else library_linear
        node.kwargs = {**node.kwargs, "at_once": at_once} if at_once else node.kwargs
    module.recompile()


class Piece(NamedTuple):
    """Some of the tokens fed to a step program, in order."""

    start: int
    length: int
    end: int  # slots from this one on are hidden from them


def replace_attention(module: GraphModule, in_pieces: bool) -> None:
    """Store masks once for all layers, and let tokens attend in PIECES, each to the slots below its own end.

    Tokens of a prompt see those before them, so half of what a chunk's tokens are compared with in its own slots is
    hidden; torch's kernel computes that too. In pieces, SmolLM2's attention to 1,024 tokens takes 0.78 of the time.
    """
    graph = module.graph
    visible = next(node for node in graph.nodes if node.op == "placeholder" and node.name == "visible")
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
        pieces = graph.call_function(pieces_of, (visible, PIECES if in_pieces else 1))
    masks: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
            continue
        given: Any = node.args if len(node.args) > 3 else (*node.args, node.kwargs.get("attn_mask"))
        query, key, value, mask, *rest = given
        if mask is None or str(mask.meta["val"].shape[2]) != str(query.meta["val"].shape[2]):
            continue  # not a row of the mask for each query
        if mask not in masks:
            with graph.inserting_before(node):
                masks[mask] = graph.call_function(mask_in_pieces, (pieces, mask))
        node.target = attention_in_pieces
        node.args = (pieces, masks[mask], query, key, value, *rest)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "attn_mask"}
    module.recompile()


def pieces_of(visible: Tensor, number: int) -> list[Piece]:
    """The tokens of `visible` `[b, s, m]`."""
    _, s, m = visible.shape
    if number == 1:
        return [Piece(0, s, m)]
    ends = visible.any(0) * torch.arange(1, m + 1, device=visible.device)  # [s, m]
    pieces = []
    for i in range(number):
        start = i * (s // number)
        length = s // number if i + 1 < number else s - start
        end: Any = ends.narrow(0, start, length).amax().item()
        torch._check(end >= 1)
        torch._check(end <= m)
        pieces.append(Piece(start, length, end))
    return pieces


def mask_in_pieces(pieces: list[Piece], mask: Tensor) -> list[Tensor]:
    """`mask` `[b, h or 1, (s g), m]`, cut."""
    return [stored(cut(piece, pieces, mask).narrow(3, 0, piece.end)) for piece in pieces]


def attention_in_pieces(
    pieces: list[Piece], masks: list[Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """`F.scaled_dot_product_attention` of `query` `[b, h, (s g), d]` to `key` and `value` `[b, h, m, d]`."""
    attended = []
    for piece, mask in zip(pieces, masks, strict=True):
        seen = key.narrow(2, 0, piece.end), value.narrow(2, 0, piece.end)
        attended.append(F.scaled_dot_product_attention(cut(piece, pieces, query), *seen, mask, *args, **kwargs))
    return torch.cat(attended, dim=2)


def cut(piece: Piece, pieces: list[Piece], x: Tensor) -> Tensor:
    """The `piece` of `x` `[b, h, (s g), d]`."""
    g = x.shape[2] // (pieces[-1].start + pieces[-1].length)
    return x.narrow(2, piece.start * g, piece.length * g)


def quantised_weight(node: Any) -> Node | None:
    """The integer weight `[o, i]` that `node` `[i, o]` is computed from, as a weight-only quantised linear layer does.

    Its scales come after the product, so that the loops of streamed_linear read the integers themselves.
    """
    aten = torch.ops.aten
    if node.target is aten.to.dtype and node.args[0].target is aten.t.default:
        weight = node.args[0].args[0]
        return None if weight.meta["val"].is_floating_point() else weight
    return None


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for many tokens, by oneDNN: on AMD's Zen 4, 200 to 215 GFLOP/s where MKL has 160 to 195."""
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight.to(x.dtype), bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def streamed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, at_once: int = 1) -> Tensor:
    """`F.linear` for at most `at_once` tokens: `x` `[..., i]`, `weight` `[o, i]`, each row of which is read once.

    Inductor makes loops of this that run at the speed of memory: a token of SmolLM2 takes 1.1 times what reading the
    weights takes, where a library call takes 3 times, and more for two to eight tokens. The weights keep their layout,
    so that library calls for many tokens can share them.
    """
    tokens = rearrange(x, "... i -> (...) i").contiguous()
    m = tokens.shape[0]
    tokens = tokens[torch.arange(at_once).clamp(max=m - 1)]  # the last one fills up
    tokens = stored(tokens)
    # One loop has all these sums: it goes through two rows of weights, which keeps more reads under way than one does,
    # and through all tokens with each piece of them.
    sums = [torch.cat([(half * token).sum(-1) for half in weight.chunk(2)]) for token in tokens]  # [o] each
    out = torch.stack(sums)[torch.arange(m)].unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


def stored(x: Tensor) -> Tensor:
    """`x` in memory. Inductor would compute what is cheap again for each use, as tokens for each row of a weight."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())  # it takes the bytes of `x` as they are
