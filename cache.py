"""The static cache: tensors of slots, who sees which slot, and how beams share or copy them.

A row of the cache is one text or one prompt with all its beams. In the *shared* layout the `k` beams of a prompt are
`k` tokens of one row: the prompt is held once, `visible` says which slots each beam sees, a reorder gathers that small
mask, and a slot that no beam sees is free again (tree attention: DeFT, arXiv 2404.00242; trie beam search, arXiv
2502.00085). In the *expanded* layout every beam is a row of its own: the tensors are repeated, and a reorder copies
what follows the prompt.

    cache = share(cache, k=4)                       # or expand(cache, k=4)
    cache = reorder(cache, parents)                 # beams continue from these parents
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor


class Cache(NamedTuple):
    """The state of `b` rows. `k` is 1 after prefill and in the expanded layout."""

    tensors: list[Tensor]  # the program's state: [b, ...] each, keys and values [b, h, l, d]
    slot_axes: tuple[int | None, ...]  # each tensor's slot axis; None: a state without slots
    slot_positions: Tensor  # [b, l] int64: the position of the token held in each slot
    visible: Tensor  # [b, k, m] bool: which of the first m <= l slots each beam sees; the others are not looked at
    positions: Tensor  # [b] int64: the position of each row's next token
    next_slots: Tensor  # [b] int64: the first slot after all that was read; used where slots stay in order
    prompt: int  # slots below this one hold prompt in every row: equal among the beams of a prompt, never copied


def allocate(
    empty: Callable[[int, int], list[Tensor]], slot_axes: tuple[int | None, ...], b: int, l: int, device: torch.device
) -> Cache:
    """`b` rows of `l` slots that have read nothing; `empty(b, l)` makes the program's state."""
    return Cache(
        tensors=empty(b, l),
        slot_axes=slot_axes,
        slot_positions=torch.zeros(b, l, dtype=torch.int64, device=device),
        visible=torch.zeros(b, 1, 0, dtype=torch.bool, device=device),
        positions=torch.zeros(b, dtype=torch.int64, device=device),
        next_slots=torch.zeros(b, dtype=torch.int64, device=device),
        prompt=0,
    )


def grow(cache: Cache, l: int) -> Cache:
    """Room for `l` slots; what is held stays in its slots. Tensors are copied one by one: only one is there twice."""
    tensors = cache.tensors
    for i, axis in enumerate(cache.slot_axes):
        tensors[i] = tensors[i] if axis is None else _pad(tensors[i], axis, l)
    return cache._replace(slot_positions=_pad(cache.slot_positions, 1, l))


def widen(cache: Cache, step: int, room: int) -> Cache:
    """`step` more slots to look at, or those that are left; where they are too few for all beams, `room` are added."""
    (_, k, m), l = cache.visible.shape, cache.slot_positions.shape[1]
    if m + k > l:
        cache, l = grow(cache, l + max(room, k)), l + max(room, k)
    return cache._replace(visible=_pad(cache.visible, 2, min(m + max(step, k), l)))


def share(cache: Cache, k: int) -> Cache:
    """`k` beams see what each row has read; the tensors stay as they are."""
    return cache._replace(visible=repeat(cache.visible, "b 1 m -> b k m", k=k))


def expand(cache: Cache, k: int) -> Cache:
    """`k` rows in place of each one, for programs whose rows hold one text each."""
    if k == 1:
        return cache
    return Cache(
        # contiguous(): repeating one row makes a view of it, which the rows would all write to
        tensors=[repeat(t, "b ... -> (b k) ...", k=k).contiguous() for t in cache.tensors],
        slot_axes=cache.slot_axes,
        slot_positions=repeat(cache.slot_positions, "b l -> (b k) l", k=k).contiguous(),
        visible=repeat(cache.visible, "b 1 m -> (b k) 1 m", k=k),
        positions=repeat(cache.positions, "b -> (b k)", k=k),
        next_slots=repeat(cache.next_slots, "b -> (b k)", k=k),
        prompt=cache.prompt,
    )


def reorder(cache: Cache, parents: Tensor) -> Cache:
    """Beams continue from `parents` `[(b k)]`, row numbers among all `b * k` beams.

    A program's state without slots is reordered whole: left in place, the beams would be silently wrong
    (transformers issues 29730 and 46612).
    """
    rows, beams, _ = cache.visible.shape
    if beams > 1:
        own = rearrange(parents, "(b k) -> b k 1", b=rows) % beams
        return cache._replace(visible=cache.visible.take_along_dim(own, dim=1))
    end = int(cache.next_slots.max())
    for tensor, axis in zip(cache.tensors, cache.slot_axes, strict=True):
        _reorder_rows(tensor if axis is None else tensor.narrow(axis, cache.prompt, end - cache.prompt), parents)
    # Rows have the same positions as their parents, which are beams of the same prompt; only what they see may differ.
    return cache._replace(visible=cache.visible[parents])


def take_slots(cache: Cache) -> Tensor:
    """`[b, k]`: a slot for each beam's next token: the next in order, or for beams of one row, the first none sees."""
    _, k, m = cache.visible.shape
    if k == 1:
        return cache.next_slots[:, None]
    free = ~cache.visible.any(dim=1)  # [b, m]
    # topk, as nonzero() would have the host wait to learn how many there are
    return torch.topk(free * torch.arange(m, 0, -1, device=free.device), k, dim=-1).indices


def slots_left(cache: Cache) -> int:
    """How many more of the slots looked at the fullest row has."""
    _, k, m = cache.visible.shape
    used = cache.next_slots if k == 1 else cache.visible.any(dim=1).sum(-1)  # [b]
    return m - int(used.max())


def join(caches: list[Cache], order: Tensor) -> Cache:
    """Rows that were read apart, in one cache: row `i` is row `order[i]` of all of `caches`, one after the other."""
    l, m = max(c.slot_positions.shape[1] for c in caches), max(c.visible.shape[2] for c in caches)
    caches = [grow(c, l)._replace(visible=_pad(c.visible, 2, m)) for c in caches]
    parts = [torch.cat(held)[order] for held in zip(*(c.tensors for c in caches), strict=True)]
    slot_positions, visible, positions, next_slots = (
        torch.cat([getattr(c, field) for c in caches])[order]
        for field in ("slot_positions", "visible", "positions", "next_slots")
    )
    prompt = min(c.prompt for c in caches)
    return Cache(parts, caches[0].slot_axes, slot_positions, visible, positions, next_slots, prompt)


def _pad(tensor: Tensor, axis: int, l: int) -> Tensor:
    if tensor.shape[axis] >= l:
        return tensor
    grown = tensor.new_zeros(*tensor.shape[:axis], l, *tensor.shape[axis + 1 :])
    grown.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return grown


def _reorder_rows(tensor: Tensor, parents: Tensor) -> None:
    tensor.copy_(tensor.index_select(0, parents))
