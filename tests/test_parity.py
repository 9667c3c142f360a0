"""The grid: the same texts, scores and beams as transformers' eager `generate`, with the same weights in float32.

Each architecture goes through every combination of beams, penalties, stopping and eos, and draws with every filter
under one seed. The grid counts the texts that end early: an eos that no text meets would test little.
"""

import inspect
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny import CONFIGS, VOCAB, label, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedModel

import demo
from exgen import Program, compile_for_generation, export_for_generation, generate, load

torch.set_num_threads(1)
NEW = 10
LENGTHS = (12, 9, 4)  # of the prompts, left-padded; the longest two exceed the windows of 7 slots

BEAMS = {
    "num_beams": (2, 4, 6),
    "length_penalty": (-1.0, 0.0, 1.0, 2.0),
    "early_stopping": (False, True, "never"),
    "several_eos": (False, True),
    "all_returned": (False, True),
}


EXPORTED, COMPILED, EXPANDED = "exported", "compiled", "compiled, a row of the cache for each text"
GRID = [(name, EXPORTED) for name in CONFIGS] + [
    (name, kind) for name in ("llama", "gemma3") for kind in (COMPILED, EXPANDED)
]
every_kind = pytest.mark.parametrize("name, kind", GRID)


class Subject(NamedTuple):
    """A model, its program, prompts for it, and three tokens that it likes, to end its texts early."""

    model: PreTrainedModel
    program: Program
    ids: Tensor  # [3, 12]
    mask: Tensor
    eos: list[int]
    options: dict[str, Any] = {}  # noqa: RUF012  # of exgen alone


@cache
def compiled(name: str) -> Program:
    with tempfile.TemporaryDirectory() as folder:
        return load(compile_for_generation(export_for_generation(tiny(name)), Path(folder) / "tiny.pt2"))


@cache
def subject(name: str, kind: str = EXPORTED) -> Subject:
    if kind != EXPORTED:
        return subject(name)._replace(program=compiled(name), options={"share_prompt": kind != EXPANDED})
    model = tiny(name)
    ids = torch.randint(90, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    ids = ids.where(mask, CONFIGS[name].pad_token_id)
    endless: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    texts = [model.generate(ids, attention_mask=mask.long(), num_beams=k, **endless) for k in (1, 4)]
    counts = torch.cat(texts)[:, ids.shape[1] + 2 :].flatten().bincount()
    return Subject(model, load(export_for_generation(model)), ids, mask.long(), counts.topk(3).indices.tolist())


def both(subject: Subject, seed: int | None = None, **cfg: Any) -> tuple[Any, Any]:
    """What eager and exgen answer to the same call, each with its random draws from `seed`."""
    cfg = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_scores": True} | cfg
    answers = []
    for call in (subject.model.generate, lambda ids, **cfg: generate(subject.program, ids, **cfg, **subject.options)):
        torch.manual_seed(seed or 0)
        answers.append(call(subject.ids, attention_mask=subject.mask, **cfg))
    return answers[0], answers[1]


def require_equal(eager: Any, ours: Any, case: Any) -> None:
    assert torch.equal(ours.sequences, eager.sequences), case
    assert type(ours) is type(eager), case
    if "sequences_scores" in eager:
        assert torch.allclose(ours.sequences_scores, eager.sequences_scores, atol=1e-4, rtol=0), case
        assert torch.equal(ours.beam_indices, eager.beam_indices), case


def ended_early(output: Any, ids: Tensor, eos: list[int]) -> bool:
    return bool(torch.isin(output.sequences[:, ids.shape[1] : -1], torch.tensor(eos)).any())


@every_kind
def test_greedy_texts_are_those_of_eager(name: str, kind: str) -> None:
    s = subject(name, kind)
    for eos in (s.eos[:1], s.eos):
        require_equal(*both(s, eos_token_id=eos), eos)


@every_kind
def test_beams_are_those_of_eager_and_most_texts_end_early(name: str, kind: str) -> None:
    s = subject(name, kind)
    ended = []
    for num_beams, length_penalty, early_stopping, several_eos, all_returned in product(*BEAMS.values()):
        eos = s.eos if several_eos else s.eos[:1]
        cfg: dict[str, Any] = {
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "num_return_sequences": num_beams if all_returned else 1,
            "eos_token_id": eos,
        }
        eager, ours = both(s, **cfg)
        require_equal(eager, ours, cfg)
        ended.append(ended_early(eager, s.ids, eos))
    assert sum(ended) > len(ended) / 2


def even_after_odd(_: int, ids: Tensor) -> list[int]:
    return [token for token in range(VOCAB) if token % 2 != int(ids[-1]) % 2]


FILTERS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": max(LENGTHS) + 6},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "sequence_bias": {"sequence_bias": {(11,): 4.0, (12, 13): -9.0}},
    "suppress_tokens": {"suppress_tokens": list(range(0, 80, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(60))},
    "forced_bos_token_id": {"forced_bos_token_id": 21},
    "forced_eos_token_id": {"forced_eos_token_id": 22},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.3)},
    "renormalize_logits": {"renormalize_logits": True, "temperature": 0.7},
    "remove_invalid_values": {"remove_invalid_values": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_after_odd},
    "mixture of filters of sampling": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.01},
    "mixture for repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "top_k": 20},
    "mixture of words and ends": {
        "sequence_bias": {(11,): 4.0, (12, 13): -9.0},
        "suppress_tokens": [30, 31, 32],
        "exponential_decay_length_penalty": (3, 1.2),
        "begin_suppress_tokens": [33, 34],
        "epsilon_cutoff": 0.01,
        "renormalize_logits": True,
    },
}
DRAWS_ARE_SORTED = ".sort(" in inspect.getsource(GenerationMixin._get_top_k_continuations)  # from transformers 5 on
STRATEGIES: list[dict[str, Any]] = [{"num_return_sequences": 2}, {"num_beams": 3, "num_return_sequences": 2}]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_drawn_texts_are_those_of_eager_under_one_seed(strategy: dict[str, Any], filters: str) -> None:
    if filters == "top_h" and not hasattr(GenerationConfig(), "top_h"):
        pytest.skip("this transformers has no top_h")
    if "num_beams" in strategy and not DRAWS_ARE_SORTED:
        pytest.skip("this transformers takes the beams that it drew in no order, and thus others as finished")
    for seed, (name, kind) in enumerate(GRID):
        s = subject(name, kind)
        if filters == "forced_bos_token_id":  # acts on prompts of one token
            s = s._replace(ids=s.ids[:, -1:], mask=s.mask[:, -1:])
        cfg = strategy | FILTERS[filters]
        require_equal(*both(s, seed, do_sample=True, eos_token_id=s.eos, **cfg), (name, kind, cfg))


def test_a_real_model_answers_as_eager() -> None:
    folder = demo.smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = demo.encode(AutoTokenizer.from_pretrained(folder), "Name three colours of the sky.")
    real = Subject(model, load(export_for_generation(model)), ids, torch.ones_like(ids), [])
    for cfg in ({}, {"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "num_return_sequences": 2}):
        require_equal(*both(real, max_new_tokens=12, **cfg), cfg)
