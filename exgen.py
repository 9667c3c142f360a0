"""`generate` for models exported with torch.export.

    from exgen import export_for_generation, generate

    exported = export_for_generation(model)
    ids = generate(exported, input_ids, num_beams=4, max_new_tokens=32)     # [b, t] prompts in, [b, t + new] out

The prompt is read once, however many beams or samples are asked for; the options and the results are those of
transformers' `generate`. This file is the story; `config.py` reads the options, `program.py` opens the artifact,
`prefill.py` runs it, `cache.py` holds what it has read, `strategies.py` decides, and `export.py` makes artifacts.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from einops import repeat
from torch import Tensor
from torch.export import ExportedProgram
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

if __package__:
    from . import cache as slots
    from . import strategies
    from .config import Request, check_inputs, read_config
    from .export import compile_for_generation, export_for_generation
    from .prefill import decode, prefill, rows_by_length
    from .program import Program, load
else:
    import cache as slots
    import strategies
    from config import Request, check_inputs, read_config
    from export import compile_for_generation, export_for_generation
    from prefill import decode, prefill, rows_by_length
    from program import Program, load

__all__ = ["Program", "compile_for_generation", "export_for_generation", "generate", "load"]

Output: TypeAlias = Tensor | GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput

PREFILL_CHUNK = 512  # tokens of a prompt fed at once
WIDTH = 16  # slots by which the part of the cache that is looked at grows
ROOM = 64  # slots by which a cache grows at least


@torch.no_grad()
def generate(
    exported: Program | ExportedProgram | str | Path,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **cfg: Any,
) -> Output:
    """Continue the prompts `input_ids` `[b, t]`, as transformers' eager `generate` would.

    Args:
        exported: an `ExportedProgram`, a path to one saved with `torch.export.save`, or what `load` returned.
        input_ids: `[b, t]` integers, left-padded where rows differ in length.
        attention_mask: `[b, t]`, 0 for padding. None: no padding.
        generation_config, logits_processor, stopping_criteria: as in transformers.
        cfg: fields of `GenerationConfig` by name, and `prefix_allowed_tokens_fn`, `generator` (a `torch.Generator`),
            `streamer`. Defaults come from the artifact, then `generation_config`, then `cfg`.

    Returns:
        `[b * num_return_sequences, length]` int64, the prompt included, finished texts padded; or transformers'
        `GenerateDecoderOnlyOutput` / `GenerateBeamDecoderOnlyOutput` with `return_dict_in_generate=True`.

    Raises:
        TypeError, ValueError: before any model work, for inputs or options that cannot be honoured.
        FloatingPointError: the model returned NaN or infinite logits.
    """
    program = load(exported)
    ids, mask = check_inputs(input_ids, attention_mask, program.vocab_size, program.device)
    customs = (logits_processor, stopping_criteria)
    defaults, v, positions = program.generation_config, program.vocab_size, program.max_positions
    request = read_config(defaults, generation_config, cfg, ids, mask, v, *customs, max_positions=positions)
    check_room(program, mask, request.config)
    plan = choose_strategy(request, ids)

    if request.streamer is not None:
        request.streamer.put(ids.cpu())
    shared = shares_prompt(program, request.config, mask)
    logits, cache = read_prompts(program, ids, mask, request.config, max(ROOM, ids.shape[1] // 8) if shared else ROOM)
    cache = (slots.share if shared else slots.expand)(cache, plan.k)
    turn = plan.step(plan.start, checked(repeat(logits, "b v -> (b k) v", k=plan.k), request))
    while True:
        if request.streamer is not None:
            request.streamer.put(turn.tokens.cpu())
        if not turn.going:
            break
        if turn.parents is not None:
            cache = slots.reorder(cache, turn.parents)
        cache = with_room(cache)
        logits, cache = decode(program.step, cache, slots.take_slots(cache), turn.tokens)
        turn = plan.step(turn.state, checked(logits, request))
    if request.streamer is not None:
        request.streamer.end()
    return plan.finish(turn.state)


class Plan(NamedTuple):
    """A strategy with its options settled: the loop has no branch per option."""

    k: int  # texts of each prompt
    start: Any
    step: Callable[[Any, Tensor], strategies.Turn]  # (state, logits [r, v]) -> Turn
    finish: Callable[[Any], Output]


def choose_strategy(request: Request, ids: Tensor) -> Plan:
    """The strategy that `request` asks for, begun on prompts `ids` `[b, t]`."""
    config = request.config
    if config.num_beams == 1:
        return plan_texts(request, ids)
    pad = config.pad_token_id or 0
    draw = partial(strategies.draw_sampled, generator=request.generator) if config.do_sample else strategies.draw_best
    rules = strategies.BeamRules(
        prompt_length=ids.shape[1],
        max_length=config.max_length,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        eos=tuple(config.eos_token_id),
        pad=pad,
        draw=draw,
    )
    lists = {"processors": request.processors, "criteria": request.criteria, "rules": rules}
    k, n, groups = config.num_beams, config.num_return_sequences, config.num_beam_groups
    step: Callable[..., strategies.Turn]
    if groups > 1:
        step = partial(strategies.group_beam_step, **lists, diversity_penalty=config.diversity_penalty)
        start: Any = strategies.start_groups(ids, k, groups, rules, *kept(config))
        finish = partial(strategies.finish_groups, n=n, rules=rules)
    else:
        step = partial(strategies.beam_step, **lists)
        start = strategies.start_beams(ids, k, rules, *kept(config))
        finish = partial(strategies.finish_beams, n=n)
    return Plan(k, start, step, lambda state: beam_output(*finish(state), state.step_scores, state.step_logits, config))


def plan_texts(request: Request, ids: Tensor) -> Plan:
    """Greedy decoding or sampling of prompts `ids` `[b, t]`."""
    config, k = request.config, request.config.num_return_sequences
    # as in transformers, finished texts are padded only where an eos can finish them
    padded = any(hasattr(criterion, "eos_token_id") for criterion in request.criteria)
    step = partial(
        strategies.text_step,
        processors=request.processors,
        criteria=request.criteria,
        choose=partial(strategies.sample, generator=request.generator) if config.do_sample else strategies.greedy,
        pad=config.pad_token_id if padded else None,
    )
    start = strategies.start_texts(ids, k, config.max_length, *kept(config))
    return Plan(k, start, step, partial(text_output, config=config))


def kept(config: GenerationConfig) -> tuple[bool, bool]:
    """Whether each step's scores and logits are kept for the output."""
    asked = config.return_dict_in_generate
    return asked and config.output_scores, asked and config.output_logits


def read_prompts(
    program: Program, ids: Tensor, mask: Tensor, config: GenerationConfig, room: int
) -> tuple[Tensor, slots.Cache]:
    """Prefill: `ids` `[b, t]` read once, to the last token's logits `[b, v]` and a cache of `b` rows, with `room`."""
    chunk = min(config.prefill_chunk_size or PREFILL_CHUNK, program.max_feed or ids.shape[1])

    def read(ids: Tensor, mask: Tensor) -> tuple[Tensor, slots.Cache]:
        l = program.max_slots or ids.shape[1] + room
        cache = slots.allocate(program.empty, program.slot_axes, len(ids), l, ids.device)
        return prefill(program.step, cache, ids, mask, chunk)

    if program.free_slots:
        return read(ids, mask)
    groups = list(rows_by_length(mask))
    parts = [read(ids[rows][:, -n:], mask[rows][:, -n:]) for rows in groups for n in [int(mask[rows[0]].sum())]]
    order = torch.cat(groups).argsort()
    return torch.cat([logits for logits, _ in parts])[order], slots.join([cache for _, cache in parts], order)


def with_room(cache: slots.Cache) -> slots.Cache:
    """A cache with a free slot for each beam. What is looked at grows in steps, so that cost follows what is in use."""
    k, l = cache.visible.shape[1], cache.slot_positions.shape[1]
    return cache if slots.slots_left(cache) >= k else slots.widen(cache, WIDTH, room=max(ROOM, l // 8))


def shares_prompt(program: Program, config: GenerationConfig, mask: Tensor) -> bool:
    """Whether the texts of a prompt share its row of the cache; `share_prompt` overrides the rule.

    Beams always do: they agree on most of what they hold. Samples look at each other's slots in vain, which costs more
    than sharing saves where those are over twice what one text holds (SmolLM2, compiled, 2 cores, ms a step shared and
    expanded: 8 samples of 512 + 64 tokens, 63 and 72; 16 samples of 512 + 128, 140 and 109).
    """
    if not program.free_slots or program.max_slots is not None:  # in a fixed number of slots they may not fit
        return False
    if config.share_prompt is not None:
        return bool(config.share_prompt)
    new = config.max_length - mask.shape[1]
    return config.num_beams > 1 or config.num_return_sequences * new <= 2 * config.max_length


def check_room(program: Program, mask: Tensor, config: GenerationConfig) -> None:
    """Raise `ValueError` if the texts, or the longest, do not fit; the last token is chosen but never fed."""
    texts = len(mask) * max(config.num_beams, config.num_return_sequences)
    if program.max_rows is not None and texts > program.max_rows:
        raise ValueError(
            f"{texts} texts at once are asked for, but this program hides its cache and holds {program.max_rows}: give "
            "one prompt, without beams, or export the model with exgen.export_for_generation"
        )
    new, prompt = config.max_length - mask.shape[1], int(mask.sum(-1).max())
    limits = {"this program holds {:,} slots": program.max_slots, "the model has {:,} positions": program.max_positions}
    for what, most in limits.items():
        if most is not None and prompt + new - 1 > most:
            raise ValueError(
                f"the longest prompt has {prompt:,} tokens and {new:,} new are asked for, but {what.format(most)}: "
                f"shorten the prompt, or set max_new_tokens to {max(most - prompt + 1, 0):,} or less"
            )


def checked(logits: Tensor, request: Request) -> Tensor:
    """Logits `[r, v]` in float32, as transformers scores them. NaN and infinity would turn into tokens silently."""
    logits = logits.to(torch.float32)
    if not request.config.remove_invalid_values and not bool(logits.amax(-1).isfinite().all()):
        raise FloatingPointError("the model returned NaN or infinite logits: check its weights and dtype")
    return logits


def text_output(texts: strategies.Texts, config: GenerationConfig) -> Output:
    sequences = texts.sequences[:, : texts.length]
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=texts.scores, logits=texts.logits)


def beam_output(
    sequences: Tensor,
    sequences_scores: Tensor,
    parents: Tensor,
    scores: tuple[Tensor, ...] | None,
    logits: tuple[Tensor, ...] | None,
    config: GenerationConfig,
) -> Output:
    if not config.return_dict_in_generate:
        return sequences
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,
        sequences_scores=sequences_scores if config.output_scores else None,
        scores=scores,
        logits=logits,
        beam_indices=parents,
    )
