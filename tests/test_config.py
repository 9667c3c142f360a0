"""config.py against transformers' own reading of the same options, and its errors."""

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
import transformers
from tiny import label
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from config import Request, check_inputs, read_config

torch.set_num_threads(1)
VOCAB, T = 31, 5
IDS = torch.tensor([[0, 0, 7, 8, 7], [3, 4, 5, 3, 4]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
CPU = torch.device("cpu")
DEFAULTS = {"eos_token_id": 2, "bos_token_id": 1}
NEW = transformers.__version__ >= "5"


def read(
    cfg: dict[str, Any],
    defaults: dict[str, Any] = DEFAULTS,
    generation_config: GenerationConfig | None = None,
    ids: Tensor = IDS,
    mask: Tensor | None = MASK,
    processors: Any = None,
    criteria: Any = None,
    max_positions: int | None = None,
) -> Request:
    return read_config(defaults, generation_config, cfg, ids, mask, VOCAB, processors, criteria, max_positions)


class Streamer(BaseStreamer):
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class _Stop(Exception):
    pass


def of_transformers(cfg: dict[str, Any], defaults: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The processors, criteria and config with which transformers' `generate` starts to decode."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, max_position_embeddings=64))
    model.generation_config = GenerationConfig(**defaults)
    seen: dict[str, Any] = {}

    def decode(self: Any, input_ids: Tensor, **given: Any) -> None:
        seen.update(given, input_ids=input_ids)
        raise _Stop

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Stop):
        patch.setattr(LlamaForCausalLM, "_sample", decode)
        patch.setattr(LlamaForCausalLM, "_beam_search", decode)
        model.generate(arguments.pop("ids", IDS), attention_mask=arguments.pop("mask", MASK), **arguments, **cfg)
    return seen


def names(parts: Any) -> list[str]:
    return [type(part).__name__ for part in parts]


def filtered(processors: Any, texts: Tensor, scores: Tensor) -> Tensor:
    return processors(texts, scores.clone())


def ended(criteria: Any, texts: Tensor) -> Tensor:
    return criteria(texts, None)


def allowed(prompt: int, ids: Tensor) -> list[int]:
    return [4 + prompt, 9, int(ids[-1])]


SAMPLING = {"do_sample": True}
BEAMS = {"num_beams": 3}
ALONE: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 4},
    {"max_length": 9},
    {"max_length": 20},
    {"max_time": 3.5},
    {"min_new_tokens": 2},
    {"min_length": 7},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[4, 9], [6], [2]]},
    {"sequence_bias": {(4,): 2.0, (8, 7): -3.0}},
    {"sequence_bias": [[[4], 2.0], [[8, 7], -3.0]]},
    {"suppress_tokens": [1, 5, 8]},
    {"begin_suppress_tokens": [3, 2]},
    {"forced_bos_token_id": 6},
    {"forced_eos_token_id": 2, "max_new_tokens": 1},
    {"forced_eos_token_id": [2, 4], "max_new_tokens": 1},
    {"exponential_decay_length_penalty": (0, 1.3)},
    {"remove_invalid_values": True},
    {"renormalize_logits": True},
    {"prefix_allowed_tokens_fn": allowed},
    {"eos_token_id": [2, 4]},
    {"eos_token_id": None},
    {"eos_token_id": None, "min_new_tokens": 3},
    {"pad_token_id": 0},
    SAMPLING,
    *[
        SAMPLING | one
        for one in (
            {"temperature": 0.6},
            {"top_k": 3},
            {"top_k": 0},
            {"top_k": None},
            {"top_p": 0.5},
            {"min_p": 0.1},
            {"typical_p": 0.6},
            {"epsilon_cutoff": 0.03},
            {"eta_cutoff": 0.03},
            {"num_return_sequences": 2},
            {"num_return_sequences": 2, "repetition_penalty": 1.7},
            {"num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed},
        )
    ],
    BEAMS,
    BEAMS | {"repetition_penalty": 1.7, "length_penalty": 0.5, "early_stopping": "never"},
    BEAMS | {"prefix_allowed_tokens_fn": allowed, "num_return_sequences": 2},
    BEAMS | SAMPLING | {"top_k": 1},
    BEAMS | SAMPLING | {"top_k": 1, "eos_token_id": [2, 4, 6]},
    BEAMS | SAMPLING | {"top_p": 0.01, "eos_token_id": None},
]
ALONE += [SAMPLING | {"top_h": 0.4}] if NEW else []
MIXED: list[dict[str, Any]] = [
    SAMPLING | {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2, "min_new_tokens": 2},
    BEAMS
    | SAMPLING
    | {"eta_cutoff": 0.01, "epsilon_cutoff": 0.01, "typical_p": 0.9, "min_p": 0.02, "top_p": 0.9, "temperature": 1.5}
    | {"renormalize_logits": True, "no_repeat_ngram_size": 3, "top_k": 20},
    {"bad_words_ids": [[4]], "sequence_bias": {(4,): 1.0}, "suppress_tokens": [5], "begin_suppress_tokens": [6]}
    | {"forced_bos_token_id": 7, "forced_eos_token_id": 8, "remove_invalid_values": True, "renormalize_logits": True}
    | {"exponential_decay_length_penalty": (1, 1.1), "min_length": 8, "min_new_tokens": None, "max_length": 15}
    | {"prefix_allowed_tokens_fn": allowed, "repetition_penalty": 0.8, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("prompt", ["padded", "whole", "one token"])
@pytest.mark.parametrize("cfg", ALONE + MIXED, ids=label)
def test_filters_and_criteria_are_those_of_transformers(cfg: dict[str, Any], prompt: str) -> None:
    ids = IDS[:, -1:] if prompt == "one token" else IDS
    mask = MASK if prompt == "padded" else torch.ones_like(ids, dtype=torch.bool)
    theirs = of_transformers(cfg, DEFAULTS, ids=ids, mask=mask)
    ours = read(cfg, ids=ids, mask=mask)
    assert names(ours.processors) == names(theirs["logits_processor"])
    assert names(ours.criteria) == names(theirs["stopping_criteria"])
    config = theirs["generation_config"]
    assert ours.config.max_length == config.max_length
    assert ours.config.pad_token_id == (None if config._pad_token_tensor is None else config._pad_token_tensor.item())
    assert ours.config.eos_token_id == ([] if config._eos_token_tensor is None else config._eos_token_tensor.tolist())

    rows = theirs["input_ids"]
    if not NEW and cfg.keys() >= {"prefix_allowed_tokens_fn", "do_sample"}:
        return  # transformers 4 gives the function the row's index instead of the prompt's
    torch.manual_seed(0)
    for new in range(4):
        texts = torch.cat((rows, torch.randint(VOCAB, (len(rows), new))), 1)
        scores = 3 * torch.randn(len(rows), VOCAB)
        assert torch.equal(
            filtered(ours.processors, texts, scores), filtered(theirs["logits_processor"], texts, scores)
        )
        assert torch.equal(ended(ours.criteria, texts), ended(theirs["stopping_criteria"], texts))


PRECEDENCE: list[tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = [
    # artifact, generation_config, cfg -> what holds
    (
        {},
        None,
        {},
        {"max_length": T + 20, "num_beams": 1, "do_sample": False, "eos_token_id": [], "pad_token_id": None},
    ),
    ({"eos_token_id": [2, 9]}, None, {}, {"eos_token_id": [2, 9], "pad_token_id": 2}),
    ({"eos_token_id": 2, "pad_token_id": 0}, None, {}, {"eos_token_id": [2], "pad_token_id": 0}),
    ({"pad_token_id": -1, "eos_token_id": 2}, None, {}, {"pad_token_id": 2}),
    ({"eos_token_id": 50256}, None, {}, {"eos_token_id": [50256], "pad_token_id": 50256}),
    ({}, None, {"eos_token_id": torch.tensor([3, 4])}, {"eos_token_id": [3, 4], "pad_token_id": 3}),
    ({"temperature": 0.6, "do_sample": True}, None, {}, {"temperature": 0.6, "do_sample": True}),
    ({"temperature": 0.6, "do_sample": True}, {"temperature": 0.7}, {}, {"temperature": 0.7, "do_sample": True}),
    ({"temperature": 0.6}, {"temperature": 0.7, "do_sample": True}, {"temperature": 2}, {"temperature": 2.0}),
    ({"temperature": 0.6, "do_sample": True}, None, {"do_sample": False}, {"do_sample": False}),
    ({"temperature": 0.0}, None, {}, {"do_sample": False}),
    ({"num_beams": 4, "length_penalty": 2.0}, None, {"num_beams": 1}, {"num_beams": 1, "length_penalty": 2.0}),
    ({"num_beams": 4}, None, {"num_beams": None, "length_penalty": None}, {"num_beams": 1, "length_penalty": 1.0}),
    ({"max_new_tokens": 3}, None, {}, {"max_length": T + 3}),
    ({"max_new_tokens": 3, "max_length": 50}, None, {}, {"max_length": T + 3}),
    ({"max_length": 50}, None, {"max_new_tokens": 3}, {"max_length": T + 3}),
    ({"max_length": 50}, None, {}, {"max_length": 50}),
    ({"max_length": 50}, None, {"max_length": None}, {"max_length": T + 20}),
    ({"max_new_tokens": 3}, None, {"max_length": 11}, {"max_length": 11}),
    ({"max_new_tokens": 3}, {"max_new_tokens": 4}, {}, {"max_length": T + 4}),
    ({"max_length": 20, "transformers_version": "4.57.6"}, None, {}, {"max_length": T + 20}),
    ({"min_new_tokens": 3}, None, {"min_length": 9}, {"min_length": 9}),
    ({"min_length": 9}, None, {"min_new_tokens": 1}, {"min_length": T + 1}),
    ({"min_length": 90}, None, {"max_new_tokens": 1}, {"max_length": T + 1}),
    ({"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5}, None, {}, {"num_beam_groups": 2}),
    ({"num_beam_groups": 2, "num_beams": 4}, None, {"num_beams": 1}, {"num_beam_groups": 1}),
    ({}, {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5}, {}, {"diversity_penalty": 0.5}),
    (
        {"use_cache": False, "cache_implementation": "hybrid", "transformers_version": "9.0", "field_of_9": 1}
        | {"_from_model_config": True, "output_attentions": True, "low_memory": True, "guidance_scale": 1.0},
        None,
        {"use_cache": True, "prefill_chunk_size": 7},
        {"prefill_chunk_size": 7, "output_scores": False, "output_logits": False, "return_dict_in_generate": False},
    ),
]


@pytest.mark.parametrize(("defaults", "generation_config", "cfg", "expected"), PRECEDENCE, ids=label)
def test_cfg_goes_over_generation_config_over_the_artifact(
    defaults: dict[str, Any], generation_config: dict[str, Any] | None, cfg: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = None if generation_config is None else GenerationConfig(**generation_config)
    config = read(cfg, defaults, given).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_whole_generation_config_of_transformers_is_an_artifacts_default() -> None:
    written = GenerationConfig(eos_token_id=2, temperature=0.6, do_sample=True, top_k=7)
    for defaults in (written.to_dict(), written.to_diff_dict()):
        request = read({}, defaults)
        assert names(request.processors) == ["TemperatureLogitsWarper", "TopKLogitsWarper"]
        assert request.config.max_length == T + 20


def test_twenty_new_tokens_stay_within_the_models_positions() -> None:
    theirs = of_transformers({}, DEFAULTS, ids=torch.ones(1, 60, dtype=torch.int64), mask=None)
    ours = read({}, ids=torch.ones(1, 60, dtype=torch.int64), mask=None, max_positions=64)
    assert ours.config.max_length == theirs["generation_config"].max_length == 64


def test_the_callers_objects_stay_as_they_were() -> None:
    given = GenerationConfig(max_length=9, bad_words_ids=[[2], [4]])
    cfg = {"sequence_bias": [[[4], 2.0]], "eos_token_id": [2, 4], "suppress_tokens": [5]}
    processors, defaults = LogitsProcessorList([TemperatureLogitsWarper(2.0)]), {"num_beams": 2, "eos_token_id": [2]}
    before = copy.deepcopy((given.to_dict(), cfg, defaults, len(processors)))
    request = read(cfg, defaults, given, processors=processors)
    filtered(request.processors, IDS.repeat(2, 1), torch.randn(4, VOCAB))
    assert before == (given.to_dict(), cfg, defaults, len(processors))


def test_the_callers_processors_stand_before_samplings_and_replace_their_own_class() -> None:
    custom = LogitsProcessorList([TemperatureLogitsWarper(2.0), MinLengthLogitsProcessor(9, 2)])
    cfg = {"do_sample": True, "temperature": 0.5, "min_length": 7, "renormalize_logits": True}
    with pytest.warns(UserWarning, match="MinLengthLogitsProcessor"):
        ours = read(cfg, processors=custom)
    theirs = of_transformers(cfg, DEFAULTS, logits_processor=custom)["logits_processor"]
    assert names(ours.processors) == names(theirs)
    assert ours.processors[0] is custom[1]
    assert ours.processors[1] is custom[0]


def test_the_callers_criteria_replace_their_own_class_and_may_allow_more() -> None:
    custom = StoppingCriteriaList([MaxTimeCriteria(9.0), MaxLengthCriteria(40)])
    with pytest.warns(UserWarning, match="MaxLengthCriteria"):
        request = read({"max_new_tokens": 3}, criteria=custom)
    assert names(request.criteria) == ["MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria"]
    assert request.config.max_length == 40
    assert isinstance(request.criteria[1], EosTokenCriteria)


def test_groups_of_beams_filter_one_groups_rows() -> None:
    groups = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    request = read(groups | {"repetition_penalty": 1.5, "prefix_allowed_tokens_fn": lambda prompt, ids: [prompt]})
    scores = filtered(request.processors, IDS.repeat_interleave(2, 0), torch.ones(4, VOCAB))
    assert scores.isfinite().nonzero().tolist() == [[0, 0], [1, 0], [2, 1], [3, 1]]


def test_generator_and_streamer_are_handed_on() -> None:
    generator = torch.Generator().manual_seed(42)
    assert read({"do_sample": True, "generator": generator}).generator is generator
    streamer = Streamer()
    assert read({"streamer": streamer}, ids=IDS[:1], mask=None).streamer is streamer


GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_beans": 4}, TypeError, "num_beans: did you mean num_beams?"),
    ({"xyzzy": 4}, TypeError, "no option xyzzy"),
    ({"assistant_model": object()}, TypeError, "assistant_model"),
    ({"num_beams": 2.0}, TypeError, "num_beams is 2.0, but it takes an integer of at least 1"),
    ({"num_beams": True}, TypeError, "num_beams is True"),
    ({"num_beams": 0}, ValueError, "at least 1"),
    ({"do_sample": "yes"}, TypeError, "True or False"),
    ({"max_new_tokens": 0}, ValueError, "at least 1"),
    ({"max_new_tokens": -1}, ValueError, "at least 1"),
    ({"max_new_tokens": 5, "max_length": 9}, ValueError, "contradict"),
    ({"min_new_tokens": 5, "min_length": 9}, ValueError, "contradict"),
    ({"max_length": T}, ValueError, "max_new_tokens"),
    ({"max_new_tokens": 3, "min_new_tokens": 4}, ValueError, "at least 9 .* at most 8"),
    ({"max_time": -1}, ValueError, "seconds"),
    (SAMPLING | {"temperature": 0}, ValueError, "above 0"),
    (SAMPLING | {"temperature": float("nan")}, ValueError, "above 0"),
    (SAMPLING | {"top_k": -1}, ValueError, "top_k"),
    (SAMPLING | {"top_k": 2.5}, TypeError, "top_k"),
    (SAMPLING | {"top_p": 1.5}, ValueError, "top_p"),
    (SAMPLING | {"min_p": -0.1}, ValueError, "min_p"),
    (SAMPLING | {"typical_p": 0.0}, ValueError, "typical_p"),
    (SAMPLING | {"epsilon_cutoff": 1.0}, ValueError, "epsilon_cutoff"),
    (SAMPLING | {"eta_cutoff": -1.0}, ValueError, "eta_cutoff"),
    ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"),
    ({"no_repeat_ngram_size": -1}, ValueError, "no_repeat_ngram_size"),
    ({"bad_words_ids": []}, ValueError, "bad_words_ids"),
    ({"bad_words_ids": [4]}, ValueError, "bad_words_ids"),
    ({"bad_words_ids": [[VOCAB]]}, ValueError, "vocabulary"),
    ({"sequence_bias": {(4,): "a"}}, ValueError, "sequence_bias"),
    ({"sequence_bias": {(4, 99): 1.0}}, ValueError, "token 99"),
    ({"sequence_bias": [[[4, 99], 1.0]]}, ValueError, "token 99"),
    ({"exponential_decay_length_penalty": (1,)}, ValueError, "pair"),
    ({"exponential_decay_length_penalty": (1, 1.2), "eos_token_id": None}, ValueError, "set eos_token_id"),
    ({"early_stopping": "sometimes", "num_beams": 2}, ValueError, "never"),
    ({"length_penalty": float("inf"), "num_beams": 2}, ValueError, "finite"),
    ({"prefill_chunk_size": 0}, ValueError, "prefill_chunk_size"),
    *[({name: VOCAB}, ValueError, "vocabulary") for name in ("pad_token_id", "eos_token_id", "forced_bos_token_id")],
    ({"eos_token_id": [2, -1]}, ValueError, "token -1"),
    ({"eos_token_id": [2.5]}, TypeError, "2.5"),
    ({"suppress_tokens": [VOCAB]}, ValueError, "vocabulary"),
    ({"suppress_tokens": 4}, TypeError, "list"),
    ({"suppress_tokens": [4, 5], "forced_eos_token_id": 4}, ValueError, "suppress_tokens"),
    *[
        ({name: value}, ValueError, f"{name}=.* acts with do_sample=True only")
        for name, value in {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}.items()
    ],
    ({"eta_cutoff": 0.1}, ValueError, "do_sample=True"),
    ({"length_penalty": 2.0}, ValueError, "num_beams above 1"),
    ({"early_stopping": True}, ValueError, "num_beams above 1"),
    ({"num_return_sequences": 2}, ValueError, "greedy"),
    ({"num_return_sequences": 3, "num_beams": 2}, ValueError, "num_beams to 3"),
    ({"num_return_sequences": 3, "num_beams": 2, "do_sample": True}, ValueError, "num_beams to 3"),
    (GROUPS | {"num_beams": 3}, ValueError, "multiple"),
    (GROUPS | {"num_beams": 1}, ValueError, "multiple"),
    (GROUPS | {"diversity_penalty": 0.0}, ValueError, "above 0"),
    (GROUPS | {"diversity_penalty": -1.0}, ValueError, "at least 0"),
    (GROUPS | {"do_sample": True}, ValueError, "sample"),
    ({"num_beams": 4, "diversity_penalty": 0.5}, ValueError, "num_beam_groups"),
    ({"output_scores": True}, ValueError, "return_dict_in_generate"),
    ({"output_logits": True}, ValueError, "return_dict_in_generate"),
    ({"generator": 42, "do_sample": True}, TypeError, "torch.Generator"),
    ({"generator": torch.Generator()}, ValueError, "do_sample"),
    ({"streamer": Streamer()}, ValueError, "one text, 2 are"),
    ({"streamer": Streamer(), "num_beams": 2}, ValueError, "num_beams=1"),
    ({"streamer": print}, TypeError, "put"),
    ({"prefix_allowed_tokens_fn": [1]}, TypeError, "function"),
    ({"use_cache": False}, ValueError, "leave it out"),
    ({"stop_strings": ["a"]}, ValueError, "StopStringCriteria"),
    ({"guidance_scale": 2.0}, ValueError, "guidance_scale=2.0 is not supported"),
    ({"watermarking_config": {"bias": 2.0}}, ValueError, "logits_processor"),
    ({"encoder_repetition_penalty": 2.0}, ValueError, "EncoderRepetitionPenaltyLogitsProcessor"),
    *[
        ({name: value}, ValueError, f"{name}=.* not supported")
        for name, value in {
            "penalty_alpha": 0.6,
            "low_memory": True,
            "dola_layers": "high",
            "token_healing": True,
            "prompt_lookup_num_tokens": 3,
            "constraints": [1],
            "force_words_ids": [[1]],
            "cache_implementation": "static",
            "output_attentions": True,
            "output_hidden_states": True,
            "assistant_early_exit": 1,
        }.items()
    ],
]
WRONG += [] if NEW else [(SAMPLING | {"top_h": 0.4}, ValueError, "install a newer one")]


@pytest.mark.parametrize(("cfg", "error", "message"), WRONG, ids=label)
def test_what_cannot_be_honoured_raises(cfg: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        read(cfg)
    assert type(raised.value) is error


@pytest.mark.parametrize("name", ["guidance_scale", "penalty_alpha", "stop_strings"])
def test_an_artifacts_default_that_would_change_tokens_raises_until_it_is_switched_off(name: str) -> None:
    defaults = {name: ["a"] if name == "stop_strings" else 1.5}
    with pytest.raises(ValueError, match=f"{name}=.*program's generation config.*not supported"):
        read({}, defaults)
    read({name: None}, defaults)


def test_fields_of_a_generation_config_that_exgen_does_not_act_on_raise() -> None:
    with pytest.raises(ValueError, match="low_memory"):
        read({}, generation_config=GenerationConfig(low_memory=True))
    with pytest.raises(TypeError, match="did you mean num_beams"):
        read({}, generation_config=GenerationConfig(num_beans=4))
    with pytest.raises(ValueError, match="contradict"):
        read({}, generation_config=GenerationConfig(max_length=9, max_new_tokens=3))
    with pytest.raises(TypeError, match="give a GenerationConfig"):
        read({}, generation_config={"num_beams": 4})


def test_processors_and_criteria_come_as_lists() -> None:
    with pytest.raises(TypeError, match="logits_processor is a TemperatureLogitsWarper: give a list"):
        read({}, processors=TemperatureLogitsWarper(2.0))
    with pytest.raises(TypeError, match="stopping_criteria is a MaxTimeCriteria: give a list"):
        read({}, criteria=MaxTimeCriteria(2.0))


def test_inputs_come_back_as_int64_and_bool() -> None:
    for dtype in (torch.int32, torch.uint8, torch.int64):
        ids, mask = check_inputs(IDS.to(dtype), None, VOCAB, CPU)
        assert ids.dtype == torch.int64 and torch.equal(ids, IDS)
        assert mask.dtype == torch.bool and bool(mask.all())
    for given in (MASK, MASK.long(), MASK.float()):
        assert torch.equal(check_inputs(IDS, given, None, CPU)[1], MASK)


def changed(tensor: Tensor, *places: tuple[int, int, int]) -> Tensor:
    tensor = tensor.long()
    for row, column, value in places:
        tensor[row, column] = value
    return tensor


INPUTS: list[tuple[Any, Any, type[Exception], str]] = [
    ([[1, 2]], None, TypeError, "input_ids is a list: give a tensor"),
    (IDS[0], None, ValueError, "input_ids[None]"),
    (IDS[None], None, ValueError, "input_ids is [1, 2, 5]: give [b, t]"),
    (IDS.float(), None, TypeError, "torch.float32"),
    (IDS.bool(), None, TypeError, "torch.bool"),
    (IDS[:, :0], None, ValueError, "empty"),
    (IDS[:0], None, ValueError, "empty"),
    (IDS.to("meta"), None, ValueError, "input_ids is on meta, the program on cpu"),
    (IDS, MASK.to("meta"), ValueError, "attention_mask is on meta"),
    (changed(IDS.clone(), (1, 3, VOCAB)), None, ValueError, "token 31 in row 1, column 3"),
    (changed(IDS.clone(), (0, 2, -1)), None, ValueError, "token -1 in row 0, column 2"),
    (IDS, MASK.tolist(), TypeError, "attention_mask is a list"),
    (IDS, MASK[:, 1:], ValueError, "attention_mask is [2, 4]: give the shape of input_ids, [2, 5]"),
    (IDS, changed(MASK, (1, 1, 2)), ValueError, "other than 0 and 1"),
    (IDS, MASK * 0.5, ValueError, "other than 0 and 1"),
    (IDS, MASK & torch.tensor([[True], [False]]), ValueError, "row 1 of attention_mask is all padding"),
    (
        IDS,
        MASK.flip(1),
        ValueError,
        "row 0 of attention_mask has padding right of a token: pad on the left (tokenizer.pa",
    ),
    (IDS, changed(MASK, (1, 2, 0)), ValueError, "row 1 of attention_mask has padding right"),
]


@pytest.mark.parametrize(("ids", "mask", "error", "message"), INPUTS, ids=lambda value: str(value)[:40])
def test_wrong_inputs_raise(ids: Any, mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check_inputs(ids, mask, VOCAB, CPU)
