"""Decoding strategies as stateless steps: state and logits in, state and the next tokens out.

    turn = text_step(texts, logits, processors, criteria, greedy, pad=0)       # greedy, sampling
    turn = beam_step(beams, logits, processors, criteria, rules)               # beam search, beam sampling
    turn = group_beam_step(groups, logits, processors, criteria, rules)        # group beam search

Logits come as `[r, v]`, one row for each of the `r = b * k` texts. `processors(ids [r, t], scores [r, v]) -> [r, v]`
and `criteria(ids [r, t], scores) -> [r] bool` are transformers' lists, or any functions like them.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

Processors = Callable[[Tensor, Tensor], Tensor]
Criteria = Callable[[Tensor, Any], Tensor]
NEVER = -1e9  # the score of what must not be chosen, as transformers has it


class Turn(NamedTuple):
    """What one step decides."""

    state: Any  # the strategy's next state
    tokens: Tensor  # [r] int64: the token each text continues with
    parents: Tensor | None  # [r] int64: the row each text continues; None: its own
    going: bool  # some text is unfinished


class Texts(NamedTuple):
    """Texts that do not compete: greedy decoding and sampling."""

    sequences: Tensor  # [r, t_max] int64, written in place up to `length`: one buffer instead of a copy per token
    length: int
    unfinished: Tensor  # [r] bool
    scores: tuple[Tensor, ...] | None  # each step's processed [r, v], where they are asked for
    logits: tuple[Tensor, ...] | None  # each step's raw [r, v], likewise


def start_texts(input_ids: Tensor, k: int, max_length: int, keep_scores: bool, keep_logits: bool) -> Texts:
    """`k` texts for each prompt of `input_ids` `[b, t]`."""
    prompts = repeat(input_ids, "b t -> (b k) t", k=k)
    return Texts(
        sequences=torch.nn.functional.pad(prompts, (0, max_length - prompts.shape[1])),
        length=prompts.shape[1],
        unfinished=torch.ones(len(prompts), dtype=torch.bool, device=prompts.device),
        scores=() if keep_scores else None,
        logits=() if keep_logits else None,
    )


def greedy(scores: Tensor) -> Tensor:
    """`[r, v]` to the best token of each row `[r]`."""
    return scores.argmax(-1)


def sample(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """`[r, v]` to one token of each row `[r]`, drawn by its probability."""
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


def text_step(
    texts: Texts,
    logits: Tensor,
    processors: Processors,
    criteria: Criteria,
    choose: Callable[[Tensor], Tensor],
    pad: int | None,
) -> Turn:
    """Continue every text by one token; texts that are finished are padded. `pad` None: finished texts run on."""
    scores = processors(texts.sequences[:, : texts.length], logits)
    texts = texts._replace(scores=_record(texts.scores, scores), logits=_record(texts.logits, logits))
    tokens = choose(scores)
    if pad is not None:
        tokens = tokens.where(texts.unfinished, pad)
    texts.sequences[:, texts.length] = tokens
    texts = texts._replace(length=texts.length + 1)
    unfinished = texts.unfinished & ~criteria(texts.sequences[:, : texts.length], texts.scores)
    return Turn(texts._replace(unfinished=unfinished), tokens, None, bool(unfinished.any()))


class Beams(NamedTuple):
    """`k` running beams of each of `b` prompts, and the best `k` finished ones so far.

    `parents` hold, for each new token, the row among all `b * k` that it continued, -1 where there is none yet.
    """

    sequences: Tensor  # [b, k, t_max] int64
    scores: Tensor  # [b, k]: sums of log probabilities, best first
    parents: Tensor  # [b, k, new_max] int32
    length: int  # tokens in `sequences`
    finished_sequences: Tensor  # [b, k, t_max]
    finished_scores: Tensor  # [b, k]: sums divided by length ** length_penalty, best first
    finished_parents: Tensor  # [b, k, new_max]
    finished: Tensor  # [b, k] bool: holds a finished text
    improvable: Tensor  # [b] bool: a running beam may still beat a finished one
    step_scores: tuple[Tensor, ...] | None  # each step's processed [(b k), v], where they are asked for
    step_logits: tuple[Tensor, ...] | None


class BeamRules(NamedTuple):
    """What stays the same over the steps of a beam search."""

    prompt_length: int
    max_length: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    eos: tuple[int, ...]
    pad: int
    draw: Callable[[Tensor, int], Tensor]  # (scores [b, n], number) -> indices [b, number], best first


class Candidates(NamedTuple):
    """The `c` continuations of a prompt's beams that a step considers, best first."""

    scores: Tensor  # [b, c]
    tokens: Tensor  # [b, c]
    origins: Tensor  # [b, c]: which of the k beams it continues
    sequences: Tensor  # [b, c, t_max]
    parents: Tensor  # [b, c, new_max]


def start_beams(input_ids: Tensor, k: int, rules: BeamRules, keep_scores: bool, keep_logits: bool) -> Beams:
    """`k` beams for each prompt of `input_ids` `[b, t]`; all but the first start hopeless, to break the tie."""
    b, t = input_ids.shape
    device = input_ids.device
    new = rules.max_length - t
    sequences = repeat(torch.nn.functional.pad(input_ids, (0, new), value=rules.pad), "b t -> b k t", k=k)
    parents = torch.full((b, k, new), -1, dtype=torch.int32, device=device)
    scores = torch.full((b, k), NEVER, device=device)
    return Beams(
        sequences=sequences,
        scores=scores.index_fill(1, torch.tensor([0], device=device), 0.0),
        parents=parents,
        length=t,
        finished_sequences=sequences,
        finished_scores=scores,
        finished_parents=parents,
        finished=torch.zeros(b, k, dtype=torch.bool, device=device),
        improvable=torch.ones(b, dtype=torch.bool, device=device),
        step_scores=() if keep_scores else None,
        step_logits=() if keep_logits else None,
    )


def draw_best(scores: Tensor, number: int, block: int = 128) -> Tensor:
    """Beam search: the `number` best of `[b, n]`.

    The best are in the blocks with the best maxima. For 6 beams of 49,152 tokens, looking there takes 0.06 ms where
    torch.topk over all takes 0.5 ms, or 3 ms where scores have left the CPU's caches.
    """
    n = scores.shape[1]
    if n < 16 * block * number:
        return torch.topk(scores, number).indices
    blocks = rearrange(torch.nn.functional.pad(scores, (0, -n % block), value=-torch.inf), "b (m w) -> b m w", w=block)
    best = torch.topk(blocks.amax(-1), number).indices  # [b, number], of m
    within = torch.topk(rearrange(blocks.take_along_dim(best[:, :, None], 1), "b m w -> b (m w)"), number).indices
    return best.gather(1, within // block) * block + within % block


def draw_sampled(scores: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Beam sampling: `number` of `[b, n]` drawn by probability without replacement, best first."""
    drawn = torch.multinomial(scores.softmax(-1), number, generator=generator)
    return drawn.gather(1, scores.gather(1, drawn).sort(descending=True).indices)


def beam_step(beams: Beams, logits: Tensor, processors: Processors, criteria: Criteria, rules: BeamRules) -> Turn:
    """Continue the best beams, and keep those that finished (transformers' vectorised beam search, from 4.50 on)."""
    b, k, _ = beams.sequences.shape
    log_probs = processors(_texts(beams), logits.log_softmax(-1))
    beams = beams._replace(
        step_scores=_record(beams.step_scores, log_probs), step_logits=_record(beams.step_logits, logits)
    )
    first_rows = torch.arange(b, device=logits.device) * k
    candidates = best_continuations(beams, rearrange(log_probs, "(b k) v -> b k v", k=k), first_rows, rules)
    beams = beams._replace(length=beams.length + 1)
    texts = rearrange(candidates.sequences[:, :, : beams.length], "b c t -> (b c) t")
    stopped = rearrange(criteria(texts, beams.step_scores), "(b c) -> b c", b=b)
    beams = keep_finished(beams, candidates, stopped, rules)
    beams, tokens, parents = keep_running(beams, candidates, stopped, first_rows)
    beams = beams._replace(improvable=beams.improvable & may_improve(beams, beams.scores[:, 0], rules))
    settled = beams.finished.all() if rules.early_stopping is True else torch.zeros_like(stopped[0, 0])
    going = beams.improvable.any() & ~settled & ~stopped.all()
    return Turn(beams, rearrange(tokens, "b k -> (b k)"), rearrange(parents, "b k -> (b k)"), bool(going))


def best_continuations(beams: Beams, log_probs: Tensor, first_rows: Tensor, rules: BeamRules) -> Candidates:
    """The best continuations of all beams by accumulated score; `log_probs` is `[b, k, v]`, `first_rows` `[b]`.

    Each beam may end in every eos at once: of `k * (1 + eos)`, `k` can go on (transformers issue 25103).
    """
    _, k, v = log_probs.shape
    total = rearrange(log_probs + beams.scores[:, :, None], "b k v -> b (k v)")
    chosen = rules.draw(total, min(max(2, 1 + len(rules.eos)) * k, k * v))  # [b, c]
    origins, tokens = chosen // v, chosen % v
    new = beams.length - rules.prompt_length
    sequences = beams.sequences.take_along_dim(origins[:, :, None], 1)
    parents = beams.parents.take_along_dim(origins[:, :, None], 1)
    sequences[:, :, beams.length] = tokens
    parents[:, :, new] = (first_rows[:, None] + origins).to(torch.int32)
    return Candidates(total.gather(1, chosen), tokens, origins, sequences, parents)


def keep_running(
    beams: Beams, candidates: Candidates, stopped: Tensor, first_rows: Tensor
) -> tuple[Beams, Tensor, Tensor]:
    """The `k` best candidates that are not `stopped` `[b, c]`; also their tokens and parents, `[b, k]` each."""
    scores = candidates.scores + stopped * NEVER
    best = torch.topk(scores, beams.sequences.shape[1]).indices  # [b, k]
    beams = beams._replace(
        sequences=candidates.sequences.take_along_dim(best[:, :, None], 1),
        parents=candidates.parents.take_along_dim(best[:, :, None], 1),
        scores=scores.gather(1, best),
    )
    parents = candidates.origins.gather(1, best) + first_rows[:, None]
    return beams, candidates.tokens.gather(1, best), parents


def keep_finished(beams: Beams, candidates: Candidates, stopped: Tensor, rules: BeamRules) -> Beams:
    """The `k` best finished texts, old and new. A candidate counts as finished if it is among the `k` best of all."""
    k = beams.sequences.shape[1]
    among_best = torch.arange(stopped.shape[1], device=stopped.device) < k
    new = stopped & among_best
    full = beams.finished.all(1) if rules.early_stopping is True else torch.zeros_like(beams.improvable)
    closed = full | ~beams.improvable  # [b]: nothing more is let in
    scores = candidates.scores / (beams.length - rules.prompt_length) ** rules.length_penalty
    return _merge_finished(beams, candidates, scores + closed[:, None] * NEVER + ~new * NEVER, new)


def may_improve(beams: Beams, best: Tensor, rules: BeamRules) -> Tensor:
    """`[b]`: whether a beam of score `best` `[b]` can still end above the worst finished text, or one is missing."""
    if rules.early_stopping == "never" and rules.length_penalty > 0.0:
        length = rules.max_length - rules.prompt_length  # the longest text is penalised least
    else:
        length = beams.length - rules.prompt_length
    worst = beams.finished_scores.amin(1, keepdim=True).where(beams.finished, NEVER)  # [b, k]
    return ((best / length**rules.length_penalty)[:, None] > worst).any(1)


def finish_beams(beams: Beams, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `n` best texts of each prompt: sequences `[(b n), t]`, scores `[(b n)]`, parents `[(b n), new]`."""
    sequences = rearrange(beams.finished_sequences[:, :n], "b n t -> (b n) t")
    parents = rearrange(beams.finished_parents[:, :n], "b n new -> (b n) new")
    new = int((parents >= 0).sum(1).max())
    prompt_length = sequences.shape[1] - parents.shape[1]
    scores = rearrange(beams.finished_scores[:, :n], "b n -> (b n)")
    return sequences[:, : prompt_length + new], scores, parents[:, :new]


class Groups(NamedTuple):
    """Group beam search: one `Beams` of `k / g` beams for each of the `g` groups; `parents` count all `b * k` rows."""

    beams: tuple[Beams, ...]
    step_scores: tuple[Tensor, ...] | None  # each step's processed [(b k), v], where they are asked for
    step_logits: tuple[Tensor, ...] | None


def start_groups(
    input_ids: Tensor, k: int, groups: int, rules: BeamRules, keep_scores: bool, keep_logits: bool
) -> Groups:
    """`k` beams in `groups` groups for each prompt of `input_ids` `[b, t]`."""
    beams = start_beams(input_ids, k // groups, rules, False, False)
    return Groups((beams,) * groups, () if keep_scores else None, () if keep_logits else None)


def group_beam_step(
    groups: Groups,
    logits: Tensor,
    processors: Processors,
    criteria: Criteria,
    rules: BeamRules,
    diversity_penalty: float,
) -> Turn:
    """A beam search step for one group after another, each paying for tokens that groups before it took in this step.

    Diverse beam search, arXiv 1610.02424, as transformers had it until 4.56: a group is done when its own finished
    texts cannot be beaten, and from then on continues with the pad token, which later groups pay for too.
    """
    g = len(groups.beams)
    b, k, _ = groups.beams[0].sequences.shape  # k: beams of a group
    log_probs = rearrange(logits.log_softmax(-1), "(b g k) v -> g b k v", g=g, k=k)
    taken = torch.zeros_like(log_probs[0, :, 0])  # [b, v]: how often groups took each token in this step
    beams, scores, tokens, parents = [], [], [], []
    for i, group in enumerate(groups.beams):
        penalised = log_probs[i] - diversity_penalty * taken[:, None]
        scores.append(processors(_texts(group), rearrange(penalised, "b k v -> (b k) v")))
        first_rows = torch.arange(b, device=logits.device) * g * k + i * k
        group, new_tokens, new_parents = _group_step(group, scores[i], first_rows, rules)
        taken = taken.scatter_add(1, new_tokens, torch.ones_like(new_tokens, dtype=taken.dtype))
        beams.append(group)
        tokens.append(new_tokens)
        parents.append(new_parents)
    by_row = rearrange([rearrange(s, "(b k) v -> b k v", k=k) for s in scores], "g b k v -> (b g k) v")
    groups = Groups(tuple(beams), _record(groups.step_scores, by_row), _record(groups.step_logits, logits))
    unfinished = torch.stack([group.improvable for group in beams]).any()
    running = rearrange([_texts(group) for group in beams], "g r t -> (g r) t")
    going = bool(unfinished & ~criteria(running, groups.step_scores).all())
    return Turn(groups, rearrange(tokens, "g b k -> (b g k)"), rearrange(parents, "g b k -> (b g k)"), going)


def _group_step(beams: Beams, scores: Tensor, first_rows: Tensor, rules: BeamRules) -> tuple[Beams, Tensor, Tensor]:
    """One group's step from its processed `scores` `[(b k), v]`; returns its tokens and parents `[b, k]` too."""
    k = beams.sequences.shape[1]
    candidates = best_continuations(beams, rearrange(scores, "(b k) v -> b k v", k=k), first_rows, rules)
    beams = beams._replace(length=beams.length + 1)
    stopped = torch.isin(candidates.tokens, candidates.tokens.new_tensor(rules.eos))
    done = ~beams.improvable[:, None]  # [b, 1]
    beams = keep_finished(beams, candidates, stopped, rules)
    beams, tokens, parents = keep_running(beams, candidates, stopped, first_rows)
    tokens = tokens.where(~done, rules.pad)
    beams.sequences[:, :, beams.length - 1] = tokens
    full = beams.finished.all(1)
    improvable = ~full if rules.early_stopping is True else may_improve(beams, candidates.scores[:, 0], rules)
    return beams._replace(improvable=beams.improvable & (~full | improvable)), tokens, parents


def finish_groups(groups: Groups, n: int, rules: BeamRules) -> tuple[Tensor, Tensor, Tensor]:
    """The `n` best texts of each prompt over all groups; running beams of a group that is not done take part.

    As in transformers until 4.56, a text that ended in any eos is returned with the first of them.
    """
    finished = []
    for beams in groups.beams:
        scores = beams.scores / (beams.length - rules.prompt_length) ** rules.length_penalty
        scores = scores + ~beams.improvable[:, None] * NEVER
        running = Candidates(beams.scores, beams.scores, beams.scores, beams.sequences, beams.parents)
        finished.append(_merge_finished(beams, running, scores, torch.ones_like(beams.finished)))
    scores = torch.cat([beams.finished_scores for beams in finished], 1)  # [b, k]
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :, None]
    best_of_all = finished[0]._replace(
        finished_sequences=torch.cat([f.finished_sequences for f in finished], 1).take_along_dim(best, 1),
        finished_scores=scores.take_along_dim(best[:, :, 0], 1),
        finished_parents=torch.cat([f.finished_parents for f in finished], 1).take_along_dim(best, 1),
    )
    sequences, scores, parents = finish_beams(best_of_all, n)
    if rules.eos:
        new = sequences[:, rules.prompt_length :]
        ended = torch.isin(new, new.new_tensor(rules.eos)) & (parents >= 0)
        new.masked_fill_(ended, rules.eos[0])
    return sequences, scores, parents


def _merge_finished(beams: Beams, candidates: Candidates, scores: Tensor, new: Tensor) -> Beams:
    """The `k` best of the finished texts and `candidates`, by `scores` `[b, c]`; `new` `[b, c]`: which are finished."""
    merged = torch.cat((beams.finished_scores, scores), 1)
    best = torch.topk(merged, beams.finished.shape[1]).indices  # [b, k]
    rows = best[:, :, None]
    return beams._replace(
        finished_sequences=torch.cat((beams.finished_sequences, candidates.sequences), 1).take_along_dim(rows, 1),
        finished_parents=torch.cat((beams.finished_parents, candidates.parents), 1).take_along_dim(rows, 1),
        finished_scores=merged.gather(1, best),
        finished=torch.cat((beams.finished, new), 1).gather(1, best),
    )


def _texts(beams: Beams) -> Tensor:
    return rearrange(beams.sequences[:, :, : beams.length], "b k t -> (b k) t")


def _record(record: tuple[Tensor, ...] | None, step: Tensor) -> tuple[Tensor, ...] | None:
    return None if record is None else (*record, step)
