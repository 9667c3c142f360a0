"""Options: `**cfg` into a checked `GenerationConfig`, logits processors and stopping criteria.

    ids, mask = check_inputs(input_ids, attention_mask, 49152, torch.device("cpu"))  # [b, t] int64, [b, t] bool
    request = read_config({"eos_token_id": 2}, None, {"max_new_tokens": 9}, ids, mask, 49152, None, None)
    request.config.max_length, request.config.eos_token_id  # t + 9, [2]

Names, meaning and order are those of `generate` in the installed transformers. Nothing is silently ignored: an option
that cannot be acted on raises, saying what was given, what is accepted and what to do.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as stop
from transformers.generation.streamers import BaseStreamer


class Request(NamedTuple):
    """What one call of `generate` asks for. Every field of `config` that the loop reads is set."""

    config: GenerationConfig  # max_length counts the prompt; eos_token_id is a list, empty if no token ends a text
    processors: LogitsProcessorList  # (ids [r, t], scores [r, v]) -> [r, v]; r = b * k, of beam groups one group's rows
    criteria: StoppingCriteriaList  # (ids [r, t], scores) -> [r] bool
    generator: torch.Generator | None
    streamer: BaseStreamer | None


class Field(NamedTuple):
    accepted: str
    types: tuple[type, ...]
    holds: Callable[[Any], bool] = lambda value: True
    unset: Any = None  # transformers' value where nobody sets one


def whole(low: int, unset: int | None = None) -> Field:
    return Field(f"an integer of at least {low}", (int,), lambda value: value >= low, unset)


def number(accepted: str, holds: Callable[[float], bool], unset: float | None = None) -> Field:
    return Field(f"a number {accepted}", (int, float), holds, unset)


FLAG = Field("True or False", (bool,), unset=False)
TOKEN = Field("one token id", (int, Tensor), lambda value: isinstance(value, int) or value.numel() == 1)
TOKENS = Field("a token id or a list of them", (int, list, tuple, Tensor))
LIST = Field("a list of token ids", (list, tuple, Tensor))

FIELDS: dict[str, Field] = {
    "max_new_tokens": whole(1),
    "max_length": whole(1),
    "min_new_tokens": whole(0),
    "min_length": whole(0, unset=0),
    "max_time": number("of seconds, at least 0", lambda value: value >= 0),
    "num_beams": whole(1, unset=1),
    "num_beam_groups": whole(1, unset=1),
    "diversity_penalty": number("of at least 0", lambda value: value >= 0, unset=0.0),
    "num_return_sequences": whole(1, unset=1),
    "length_penalty": number("that is finite", lambda value: abs(value) < float("inf"), unset=1.0),
    "early_stopping": Field(
        "True, False or 'never'", (bool, str), lambda value: value in (True, False, "never"), False
    ),
    "prefill_chunk_size": whole(1),
    "share_prompt": FLAG._replace(unset=None),  # ours: a prompt's texts in one row of the cache, or each in its own
    "do_sample": FLAG,
    "temperature": number("above 0 (do_sample=False takes the best token)", lambda value: value > 0, unset=1.0),
    "top_h": number("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": whole(0, unset=50),
    "top_p": number("from 0 to 1", lambda value: 0 <= value <= 1, unset=1.0),
    "min_p": number("from 0 to 1", lambda value: 0 <= value <= 1),
    "typical_p": number("above 0 and at most 1", lambda value: 0 < value <= 1, unset=1.0),
    "epsilon_cutoff": number("from 0 to below 1", lambda value: 0 <= value < 1, unset=0.0),
    "eta_cutoff": number("from 0 to below 1", lambda value: 0 <= value < 1, unset=0.0),
    "repetition_penalty": number("above 0", lambda value: value > 0, unset=1.0),
    "no_repeat_ngram_size": whole(0, unset=0),
    "bad_words_ids": Field("a list of lists of token ids", (list,)),
    "sequence_bias": Field("a dict from tuples of token ids to biases", (dict, list)),
    "suppress_tokens": LIST,
    "begin_suppress_tokens": LIST,
    "forced_bos_token_id": TOKEN,
    "forced_eos_token_id": TOKENS,
    "exponential_decay_length_penalty": Field("a pair (start, factor)", (tuple, list), lambda value: len(value) == 2),
    "renormalize_logits": FLAG,
    "remove_invalid_values": FLAG,
    "pad_token_id": TOKEN,
    "bos_token_id": TOKEN,
    "eos_token_id": TOKENS,
    "output_scores": FLAG,
    "output_logits": FLAG,
    "return_dict_in_generate": FLAG,
}
ARGUMENTS = ("prefix_allowed_tokens_fn", "generator", "streamer")  # of `generate`; no fields of GenerationConfig

# Fields that act in one mode only, and the values that ask for nothing.
SAMPLING_ONLY: dict[str, tuple[float, ...]] = {"temperature": (1,), "top_h": (), "top_k": (0, 50), "top_p": (1,)}
SAMPLING_ONLY |= {"min_p": (0,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,)}
BEAMS_ONLY: dict[str, tuple[float, ...]] = {"length_penalty": (1,), "early_stopping": (False,)}

# Fields that exgen does not act on: what to do instead, which of them change tokens (an artifact's default of any other
# is inert), and the values that ask for nothing (None is one always, False where none is named).
INSTEAD = {
    "use_cache": "a program always has its cache, leave it out",
    "stop_strings": "pass transformers' StopStringCriteria(tokenizer, stop_strings) in stopping_criteria",
    "watermarking_config": "pass the processor it constructs in logits_processor",
    "encoder_repetition_penalty": "pass transformers' EncoderRepetitionPenaltyLogitsProcessor in logits_processor",
    "encoder_no_repeat_ngram_size": "pass transformers' EncoderNoRepeatNGramLogitsProcessor in logits_processor",
}
CHANGES_TOKENS = {"guidance_scale", "token_healing", "penalty_alpha", "dola_layers", "constraints", "force_words_ids"}
CHANGES_TOKENS |= INSTEAD.keys() - {"use_cache"}
NEUTRAL: dict[str, Any] = {"use_cache": True, "guidance_scale": 1, "encoder_repetition_penalty": 1}
NEUTRAL |= {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant", "assistant_lookbehind": 10}
NEUTRAL |= {"assistant_confidence_threshold": 0.4, "target_lookbehind": 10}


def check_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Checked `input_ids` `[b, t]` as int64, and the mask `[b, t]` as bool (all True where none is given).

    Raises:
        TypeError: not a tensor, or not of integers.
        ValueError: not `[b, t]`, empty, an id outside the vocabulary, another device; a mask of another shape or with
            values other than 0 and 1, a row that is all padding, padding right of a token.
    """
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if given is None and name == "attention_mask":
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}: give a tensor [b, t], such as torch.tensor([[1, 2]])")
        if (given.device.type, given.device.index or 0) != (device.type, device.index or 0):
            raise ValueError(f"{name} is on {given.device}, the program on {device}: move it with .to({str(device)!r})")
    shape = list(input_ids.shape)
    if len(shape) != 2:
        hint = "input_ids[None] makes it one prompt" if len(shape) == 1 else "one row per prompt"
        raise ValueError(f"input_ids is {shape}: give [b, t], {hint}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids is {input_ids.dtype}: give token ids as integers, torch.int64")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is {shape}, empty: give each prompt a token at least, such as bos")
    ids, end = input_ids.long(), vocab_size or torch.iinfo(torch.int64).max
    outside = (ids < 0) | (ids >= end)
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        where = f"input_ids has the token {ids[row, column]} in row {row}, column {column}"
        raise ValueError(f"{where}, but the vocabulary goes from 0 to {end - 1}: use this model's tokenizer")
    if attention_mask is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)

    if attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {list(attention_mask.shape)}: give the shape of input_ids, {shape}")
    mask = attention_mask.bool()
    if (attention_mask != mask).any():
        raise ValueError("attention_mask has values other than 0 and 1: give 1 for tokens and 0 for padding")
    blank, late = ~mask.any(1), (mask[:, :-1] & ~mask[:, 1:]).any(1)  # [b], [b]
    if blank.any():
        raise ValueError(f"row {blank.nonzero()[0].item()} of attention_mask is all padding: leave the prompt out")
    if late.any():
        where = f"row {late.nonzero()[0].item()} of attention_mask has padding right of a token"
        raise ValueError(f'{where}: pad on the left (tokenizer.padding_side = "left")')
    return ids, mask


def read_config(
    defaults: Mapping[str, Any],
    generation_config: GenerationConfig | None,
    cfg: Mapping[str, Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    vocab_size: int | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    max_positions: int | None = None,
) -> Request:
    """What `cfg` asks for, over `generation_config`, over the artifact's `defaults`, over transformers' own values.

    Args:
        input_ids, attention_mask: `[b, t]`, as `check_inputs` returns them.
        logits_processor, stopping_criteria: the caller's own; one of a class that the options ask for replaces it.
        max_positions: the model's longest text, which caps the 20 new tokens of a call that sets no length.

    Raises:
        TypeError: an unknown name, or a value of another type.
        ValueError: a value out of range, options that contradict each other or that exgen does not act on.
    """
    asked = {name: value for name, value in cfg.items() if name not in ARGUMENTS}
    prefix_fn, generator, streamer = (cfg.get(name) for name in ARGUMENTS)
    given = {} if generation_config is None else _fields_set(generation_config)
    merged = _merged(_artifact_fields(defaults), given, asked)
    asked = {name: value for name, value in asked.items() if value is not None}
    explicit = asked.keys() | given.keys()
    _check_names(merged, cfg.keys() | given.keys(), explicit)

    config = GenerationConfig()
    for name, field in FIELDS.items():
        value = merged.get(name, field.unset)
        # None in `cfg` switches a filter of sampling off, and elsewhere stands for transformers' own value
        value = field.unset if value is None and name not in SAMPLING_ONLY else value
        inert = name in SAMPLING_ONLY and name not in explicit and not config.do_sample
        setattr(config, name, value if value is None or inert else _checked(name, value))
    if config.num_beams == 1 and "num_beam_groups" not in explicit:
        config.num_beam_groups = 1
    _settle_tokens(config, vocab_size, explicit)
    _settle_lengths(config, input_ids.shape[1], max_positions, explicit)
    _check_modes(config, asked, input_ids, prefix_fn, generator, streamer)

    processors = _processors(config, input_ids, attention_mask, prefix_fn, logits_processor)
    criteria = _criteria(config, input_ids.device, max_positions, stopping_criteria)
    for criterion in criteria:  # the caller's own may allow more
        if type(criterion) is stop.MaxLengthCriteria:
            config.max_length = max(config.max_length, criterion.max_length)
    return Request(config, processors, criteria, generator, streamer)


Part = tuple[str, bool, Callable[..., Any], tuple[Any, ...]]  # (field, whether it is on, class, arguments)


def _processors(
    c: GenerationConfig, ids: Tensor, mask: Tensor | None, prefix_fn: Any, custom: LogitsProcessorList | None
) -> LogitsProcessorList:
    """The filters that `c` asks for, in the one order they apply; the caller's `custom` ones before sampling's."""
    t, dev = ids.shape[1], ids.device
    rows = max(c.num_beams, c.num_return_sequences) // c.num_beam_groups  # of scores for each prompt
    padding = None  # [r]: padding counts as repetition, unless transformers' class can tell (from 5 on)
    if mask is not None and "Tensor" in str(inspect.signature(lp.RepetitionPenaltyLogitsProcessor)):
        padding = None if mask.all() else mask.int().argmax(1).repeat_interleave(rows)
    eos = torch.tensor(c.eos_token_id, device=dev) if c.eos_token_id else None
    bos, last, decay = c.forced_bos_token_id, c.forced_eos_token_id, c.exponential_decay_length_penalty
    suppress, begin, start = c.suppress_tokens, c.begin_suppress_tokens, t + (t == 1 and bos is not None)
    min_length, min_new = c.min_length if eos is not None else 0, c.min_new_tokens if eos is not None else 0
    penalty, ngram, words, bias = c.repetition_penalty, c.no_repeat_ngram_size, c.bad_words_ids, c.sequence_bias
    filters: list[Part] = [
        ("sequence_bias", bias is not None, lp.SequenceBiasLogitsProcessor, (bias,)),
        ("repetition_penalty", penalty != 1, lp.RepetitionPenaltyLogitsProcessor, (penalty, padding)),
        ("no_repeat_ngram_size", ngram > 0, lp.NoRepeatNGramLogitsProcessor, (ngram,)),
        ("bad_words_ids", words is not None, lp.NoBadWordsLogitsProcessor, (words, eos)),
        ("min_length", min_length > 0, lp.MinLengthLogitsProcessor, (min_length, eos, dev)),
        ("min_new_tokens", bool(min_new), lp.MinNewTokensLengthLogitsProcessor, (t, min_new, eos, dev)),
        ("prefix_allowed_tokens_fn", prefix_fn is not None, lp.PrefixConstrainedLogitsProcessor, (prefix_fn, rows)),
        ("forced_bos_token_id", bos is not None, lp.ForcedBOSTokenLogitsProcessor, (bos,)),
        ("forced_eos_token_id", last is not None, lp.ForcedEOSTokenLogitsProcessor, (c.max_length, last, dev)),
        ("remove_invalid_values", c.remove_invalid_values, lp.InfNanRemoveLogitsProcessor, ()),
        ("exponential_decay_length_penalty", decay is not None, lp.ExponentialDecayLengthPenalty, (decay, eos, t)),
        ("suppress_tokens", suppress is not None, lp.SuppressTokensLogitsProcessor, (suppress, dev)),
        ("begin_suppress_tokens", begin is not None, lp.SuppressTokensAtBeginLogitsProcessor, (begin, start, dev)),
    ]
    out, top_h = -float("inf"), vars(c)["top_h"]
    keep = 1 if c.num_beams == 1 else 1 + max(1, len(c.eos_token_id))  # beams need a token that is no eos
    samplers: list[Part] = [
        ("temperature", c.temperature not in (None, 1), lp.TemperatureLogitsWarper, (c.temperature,)),
        ("top_h", top_h is not None, getattr(lp, "TopHLogitsWarper", _no_top_h), (top_h,)),
        ("top_k", bool(c.top_k), lp.TopKLogitsWarper, (c.top_k, out, keep)),
        ("top_p", c.top_p not in (None, 1), lp.TopPLogitsWarper, (c.top_p, out, keep)),
        ("min_p", c.min_p is not None, lp.MinPLogitsWarper, (c.min_p, out, keep)),
        ("typical_p", c.typical_p not in (None, 1), lp.TypicalLogitsWarper, (c.typical_p, out, keep)),
        ("epsilon_cutoff", bool(c.epsilon_cutoff), lp.EpsilonLogitsWarper, (c.epsilon_cutoff, out, keep)),
        ("eta_cutoff", bool(c.eta_cutoff), lp.EtaLogitsWarper, (c.eta_cutoff, out, keep, dev)),
    ]
    built = _with_custom(_built(filters), custom, "logits_processor")
    built += _built(samplers if c.do_sample else [])
    built += _built([("renormalize_logits", c.renormalize_logits, lp.LogitNormalization, ())])
    return LogitsProcessorList(built)


def _criteria(
    c: GenerationConfig, dev: torch.device, max_positions: int | None, custom: StoppingCriteriaList | None
) -> StoppingCriteriaList:
    """What ends a text; the clock of `max_time` starts here."""
    eos = torch.tensor(c.eos_token_id, device=dev)
    stops: list[Part] = [
        ("max_length", True, stop.MaxLengthCriteria, (c.max_length, max_positions)),
        ("max_time", c.max_time is not None, stop.MaxTimeCriteria, (c.max_time,)),
        ("eos_token_id", len(eos) > 0, stop.EosTokenCriteria, (eos,)),
    ]
    return StoppingCriteriaList(_with_custom(_built(stops), custom, "stopping_criteria"))


def _built(parts: list[Part]) -> list[Any]:
    """The parts that are on. Their classes refuse values by names of their own, so the field's name goes before."""
    built = []
    for name, on, part, arguments in parts:
        try:
            built += [part(*arguments)] if on else []
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{name}: {error}") from error
    return built


def _no_top_h(top_h: float) -> None:
    raise ValueError(f"{top_h} is given, but transformers {transformers.__version__} has no top_h: install a newer one")


def _with_custom(built: list[Any], custom: Any, argument: str) -> list[Any]:
    """`built` with the caller's `custom` ones: in place of those of the same class, the others after them."""
    if not isinstance(custom, (list, tuple, type(None))):
        raise TypeError(f"{argument} is a {type(custom).__name__}: give a list of them")
    own = {type(each): each for each in reversed(custom or [])}  # the first of a class
    for name in [type(each).__name__ for each in built if type(each) in own]:
        warnings.warn(f"{argument} has a {name}, which replaces the one that the options ask for", stacklevel=2)
    built = [own.get(type(each), each) for each in built]
    return built + [each for each in custom or [] if each not in built]


def _fields_set(generation_config: GenerationConfig) -> dict[str, Any]:
    """What the caller set in `generation_config`: in transformers 4 its fields have values where nobody sets them."""
    if not isinstance(generation_config, GenerationConfig):
        raise TypeError(f"generation_config is a {type(generation_config).__name__}: give a GenerationConfig")
    plain = vars(GenerationConfig())
    fields = {name: value for name, value in vars(generation_config).items() if value is not None and name[0] != "_"}
    fields.pop("transformers_version", None)
    return {name: value for name, value in fields.items() if plain.get(name) is None or value != plain[name]}


def _artifact_fields(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """An artifact's defaults that say something: transformers 4 writes a `max_length` of 20 where nobody set it."""
    fields = {name: value for name, value in defaults.items() if value is not None}
    old = "4." in (str(fields.get("transformers_version"))[:2], transformers.__version__[:2])
    if "max_new_tokens" in fields or (old and fields.get("max_length") == 20):
        fields.pop("max_length", None)
    if "min_new_tokens" in fields:
        fields.pop("min_length", None)
    return fields


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The last layer that has a field decides; a length set either way replaces one set the other way below."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for new, total in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if layer.get(new) is not None and layer.get(total) is not None:
                both = f"{new}={layer[new]} and {total}={layer[total]}"
                raise ValueError(f"{both} contradict ({total} counts the prompt too): give one of them")
            for this, other in ((new, total), (total, new)):
                if layer.get(this) is not None:
                    merged.pop(other, None)
        merged |= layer
    return merged


def _check_names(merged: dict[str, Any], names: Set[str], explicit: Set[str]) -> None:
    """Raise for names that nobody knows, and for fields that ask for what exgen does not do."""
    known = {*FIELDS, *ARGUMENTS, *vars(GenerationConfig()), *NEUTRAL, *CHANGES_TOKENS}
    for name in sorted(names - known):
        near = difflib.get_close_matches(name, [*FIELDS, *ARGUMENTS], 1)
        hint = f"did you mean {near[0]}?" if near else "see the fields of transformers' GenerationConfig"
        raise TypeError(f"generate has no option {name}: {hint}")
    for name, value in merged.items():
        acts = name not in FIELDS and (name in explicit or name in CHANGES_TOKENS)
        if acts and value not in (None, NEUTRAL.get(name, False)):
            origin = "" if name in explicit else " (of the program's generation config)"
            what = INSTEAD.get(name, f"leave it out, or pass {name}=None")
            raise ValueError(f"{name}={value!r}{origin} is not supported: {what}")


def _checked(name: str, value: Any) -> Any:
    """`value` if field `name` takes it; numbers as float, as transformers' classes want them."""
    field = FIELDS[name]
    fits = isinstance(value, field.types) and (bool in field.types or not isinstance(value, bool))
    if not fits or not field.holds(value):
        raise (ValueError if fits else TypeError)(f"{name} is {value!r}, but it takes {field.accepted}")
    return float(value) if float in field.types else value


def _settle_tokens(config: GenerationConfig, vocab_size: int | None, explicit: Set[str]) -> None:
    """Make `eos_token_id` a list, `pad_token_id` an int or None. An artifact's ids outside the vocabulary are inert."""
    end = vocab_size or torch.iinfo(torch.int64).max
    names = [name for name, field in FIELDS.items() if field in (TOKEN, TOKENS, LIST)]
    ids = {name: list(_token_ids(getattr(config, name))) for name in [*names, "bad_words_ids", "sequence_bias"]}
    for name in ids:
        for token in ids[name] if name in explicit else ():
            if not isinstance(token, int):
                raise TypeError(f"{name} has the token {token!r}, but it takes {FIELDS[name].accepted}")
            if not 0 <= token < end:
                raise ValueError(f"{name} has the token {token}, but the vocabulary is 0 to {end - 1}: leave it out")
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if ids[name] and {*ids[name]} <= {*ids["suppress_tokens"]}:
            raise ValueError(f"{name}={ids[name]} is in suppress_tokens too, which leaves nothing: drop one of them")
    config.eos_token_id = ids["eos_token_id"]
    pad = [token for token in ids["pad_token_id"] if 0 <= token < end] + config.eos_token_id
    config.pad_token_id = pad[0] if pad else None


def _token_ids(value: Any) -> Iterator[Any]:
    """The token ids in an id, a tensor, a list of ids or of lists of them, `sequence_bias` as a dict or as pairs."""
    value = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(value, (list, tuple, dict, type(None))):
        yield value
    for each in value if isinstance(value, (list, tuple, dict)) else ():
        pair = isinstance(each, (list, tuple)) and len(each) == 2 and isinstance(each[0], (list, tuple))
        yield from _token_ids(each[0] if pair else each)


def _settle_lengths(config: GenerationConfig, t: int, max_positions: int | None, explicit: Set[str]) -> None:
    """Make `max_length` and `min_length` count the prompt of `t` tokens; 20 new ones where nobody sets a length."""
    if config.max_new_tokens is not None:
        config.max_length = t + config.max_new_tokens
    elif config.max_length is None:
        config.max_length = min(t + 20, max_positions or t + 20)
    if config.min_new_tokens is not None:
        config.min_length = t + config.min_new_tokens
    low, high = config.min_length, config.max_length
    if high <= t:
        raise ValueError(f"max_length is {high} and the prompt, which it counts, {t}: set max_new_tokens instead")
    if low > high and explicit & {"min_length", "min_new_tokens"}:
        both = f"at least {low} tokens are asked for and at most {high}, the prompt's {t} included"
        raise ValueError(f"{both}: raise max_new_tokens or lower min_new_tokens")


def _check_modes(
    c: GenerationConfig, asked: dict[str, Any], ids: Tensor, prefix_fn: Any, generator: Any, streamer: Any
) -> None:
    """Raise for options that do not go together. Only what `cfg` itself asks for can be out of place in a mode."""
    for name, argument, fits, accepted in (
        ("prefix_allowed_tokens_fn", prefix_fn, callable(prefix_fn), "a function (prompt index, ids [t]) -> ids"),
        ("generator", generator, isinstance(generator, torch.Generator), "a torch.Generator"),
        ("streamer", streamer, hasattr(streamer, "put") and hasattr(streamer, "end"), "one with put(ids) and end()"),
    ):
        if argument is not None and not fits:
            raise TypeError(f"{name} is a {type(argument).__name__}: give {accepted}")
    sampling, beams = (SAMPLING_ONLY, "do_sample=True", c.do_sample), (BEAMS_ONLY, "num_beams above 1", c.num_beams > 1)
    for fields, mode, on in (sampling, beams):
        for name in [] if on else fields.keys() & asked.keys():
            if asked[name] not in fields[name]:
                raise ValueError(f"{name}={asked[name]!r} acts with {mode} only: set that too, or leave {name} out")
    k, n, g, texts = c.num_beams, c.num_return_sequences, c.num_beam_groups, len(ids) * c.num_return_sequences
    outputs, decay = (asked.get("output_scores"), asked.get("output_logits")), c.exponential_decay_length_penalty
    elsewhere = generator is not None and generator.device.type != ids.device.type
    for wrong, message in (
        (n > k == 1 and not c.do_sample, f"num_return_sequences is {n}, but greedy finds one: set num_beams={n} too"),
        (n > k > 1, f"num_return_sequences is {n} and num_beams {k}: set num_beams to {n} or more"),
        (k % g, f"num_beams={k} cannot be split into num_beam_groups={g}: make it a multiple"),
        (g > 1 and not c.diversity_penalty, f"num_beam_groups={g} would find the same: set diversity_penalty above 0"),
        (g > 1 and c.do_sample, f"num_beam_groups={g} cannot sample: set do_sample=False or num_beam_groups=1"),
        (g == 1 and asked.get("diversity_penalty"), "diversity_penalty acts between groups: set num_beam_groups too"),
        (any(outputs) and not c.return_dict_in_generate, "outputs are asked for: set return_dict_in_generate=True too"),
        (generator is not None and not c.do_sample, "generator is given, but nothing is drawn: set do_sample=True"),
        (elsewhere, f"generator is on another device than input_ids: use torch.Generator({ids.device.type!r})"),
        (streamer is not None and k > 1, f"streamer: texts of num_beams={k} change until the end: use num_beams=1"),
        (streamer is not None and texts > 1, f"streamer takes one text, {texts} are asked for: give one prompt"),
        (decay and not c.eos_token_id, "exponential_decay_length_penalty favours eos: set eos_token_id too"),
    ):
        if wrong:
            raise ValueError(message)
