"""Everything that runs the program: `prefill` reads the prompts once, `decode` feeds one token to every beam.

logits, cache = prefill(program.step, cache, input_ids, attention_mask, chunk=512)  # [b, v]
logits, cache = decode(program.step, cache, slots, tokens)                          # [(b k), v]
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

Step = Callable[..., tuple[Tensor, list[Tensor]]]


Cache = Any  # of cache.py, which says what its fields hold; named here only, so that this file stands alone


def prefill(step: Step, cache: Cache, input_ids: Tensor, attention_mask: Tensor, chunk: int) -> tuple[Tensor, Cache]:
    """Read prompts `input_ids` `[b, t]` once into an empty cache; `attention_mask` `[b, t]` is False on left padding.

    The prompt is fed `chunk` columns at a time, each attending to what exists by then, so that nothing but the cache
    grows with its length. Returns the last column's logits `[b, v]`.
    """
    b, t = input_ids.shape
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # a pad's position does not matter: nobody sees it
    for start in range(0, t, chunk):
        end = min(start + chunk, t)
        slots = torch.arange(start, end, device=input_ids.device)
        logits, tensors = step(
            input_ids[:, start:end],
            positions[:, start:end],
            repeat(slots, "s -> b s", b=b),
            prompt_visible(attention_mask[:, :end], slots),
            torch.tensor([end - start - 1], device=input_ids.device),
            cache.slot_positions,
            cache.tensors,
        )
        cache = cache._replace(tensors=tensors)
    return rearrange(logits, "b 1 v -> b v"), cache._replace(
        visible=rearrange(attention_mask, "b t -> b 1 t"),
        positions=attention_mask.sum(-1),
        next_slots=torch.full((b,), t, device=input_ids.device),
        prompt=t,
    )


def decode(step: Step, cache: Cache, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Cache]:
    """Feed `tokens` `[(b k)]`, one to each beam, into `slots` `[b, k]`; returns logits `[(b k), v]`."""
    _, k, _ = cache.visible.shape
    visible = cache.visible.scatter(2, slots[:, :, None], True)
    logits, tensors = step(
        rearrange(tokens, "(b k) -> b k", k=k),
        repeat(cache.positions, "b -> b k", k=k),
        slots,
        visible,
        torch.arange(k, device=tokens.device),
        cache.slot_positions,
        cache.tensors,
    )
    cache = cache._replace(
        tensors=tensors, visible=visible, positions=cache.positions + 1, next_slots=cache.next_slots + 1
    )
    return rearrange(logits, "b k v -> (b k) v"), cache


def prompt_visible(attention_mask: Tensor, slots: Tensor) -> Tensor:
    """`[b, s, m]` bool: prompt tokens in `slots` `[s]` see the real ones of `attention_mask` `[b, m]` up to themselves,
    and themselves.

    A pad sees itself alone: a row that sees nothing would be softmax over nothing, NaN.
    """
    every = torch.arange(attention_mask.shape[1], device=slots.device)
    own = every == slots[:, None]  # [s, m]
    before = every <= slots[:, None]  # [s, m]
    return before & attention_mask[:, None, :] | own


def rows_by_length(attention_mask: Tensor) -> Iterator[Tensor]:
    """Row numbers `[n]` of the prompts of each length, for programs that read unpadded rows only."""
    lengths = attention_mask.sum(-1)  # [b]
    for length in lengths.unique():
        yield (lengths == length).nonzero()[:, 0]
