"""What exgen promises, in the order a reader would ask. The oracle stands in the same test: transformers' eager
`generate` with the same weights in float32, or twenty group beam searches of transformers 4.46, which still had them.

`tests/` goes wider: every architecture and option (`test_parity.py`), faults reported elsewhere (`test_cases.py`).
"""

import gc
import inspect
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import label
from torch import Tensor
from torch.export import ExportedProgram
from toys import exported_history, history, history_oracle, table, watched
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import exgen
from exgen import Program, export_for_generation, load

torch.set_num_threads(1)
generate: Any = exgen.generate  # a tensor or an output, as the options say
GOLDEN = Path(__file__).parent / "tests" / "golden"
CASES = json.loads((GOLDEN / "group_beam_search.json").read_text())["cases"]

NEW, T, VOCAB = 12, 9, 99
LENGTHS = torch.tensor([9, 5, 2])
IDS = torch.randint(3, VOCAB, (3, T), generator=torch.Generator().manual_seed(5))
MASK = (torch.arange(T) >= T - LENGTHS[:, None]).long()
IDS = IDS * MASK  # left-padded with 0

# Beams end in tokens that this model likes; a pad of its own, because transformers 5 writes eos where the pad is 0.
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [40, 73], "pad_token_id": 98}
WHOLE = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
DRAWS_ARE_SORTED = ".sort(" in inspect.getsource(GenerationMixin._get_top_k_continuations)  # from transformers 5 on
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "six samples": {"do_sample": True, "num_return_sequences": 6},
    "beams": {"num_beams": 6, "num_return_sequences": 6},
    "beam sample": {"do_sample": True, "num_beams": 6, "num_return_sequences": 2},
}
WITH_EAGER = dict(STRATEGIES)
GROUPS = {"num_beams": 6, "num_beam_groups": 3, "num_return_sequences": 6, "diversity_penalty": 0.5}
if not DRAWS_ARE_SORTED:  # what is drawn for beams is taken in no order there, and other beams as finished
    WITH_EAGER.pop("beam sample")
with_eager = pytest.mark.parametrize("strategy", WITH_EAGER.values(), ids=WITH_EAGER)
every_strategy = pytest.mark.parametrize("strategy", [*STRATEGIES.values(), GROUPS], ids=[*STRATEGIES, "groups"])


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(GOLDEN / "tiny-llama", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def exported(model: LlamaForCausalLM) -> ExportedProgram:
    return export_for_generation(model)


@pytest.fixture(scope="session")
def program(exported: ExportedProgram) -> Program:
    return load(exported)


def seeded(generate: Any, *inputs: Any, **cfg: Any) -> Any:
    torch.manual_seed(0)
    return generate(*inputs, **cfg)


# The same texts as eager


@with_eager
def test_every_strategy_gives_what_eager_gives(model: Any, program: Program, strategy: dict[str, Any]) -> None:
    cfg = {"attention_mask": MASK, **OPTIONS, **WHOLE, **strategy}
    eager, ours = seeded(model.generate, IDS, **cfg), seeded(generate, program, IDS, **cfg)
    assert type(ours) is type(eager)
    assert torch.equal(ours.sequences, eager.sequences)
    assert torch.isin(eager.sequences[:, T:-1], torch.tensor(OPTIONS["eos_token_id"])).any()
    for field in ("scores", "logits"):
        assert torch.allclose(torch.stack(ours[field]), torch.stack(eager[field]), atol=1e-4), field
    if "num_beams" in strategy:
        assert torch.allclose(ours.sequences_scores, eager.sequences_scores, atol=1e-4)
        assert torch.equal(ours.beam_indices, eager.beam_indices)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_group_beam_search_gives_what_transformers_gave(program: Program, case: dict[str, Any]) -> None:
    ids, mask = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"])
    ours = generate(program, ids, mask, return_dict_in_generate=True, output_scores=True, **case["cfg"])
    assert ours.sequences.tolist() == case["sequences"]
    assert ours.sequences_scores.tolist() == pytest.approx(case["sequences_scores"], abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ({}, {"sequences"}),
        ({"output_scores": True}, {"sequences", "scores"}),
        ({"output_logits": True}, {"sequences", "logits"}),
    ],
    ids=label,
)
@pytest.mark.parametrize("strategy", [{}, {"num_beams": 2}], ids=label)
def test_outputs_hold_what_was_asked_for(
    model: Any, program: Program, strategy: dict[str, Any], flags: dict[str, bool], fields: set[str]
) -> None:
    cfg = {"attention_mask": MASK, **OPTIONS, **strategy, **flags, "return_dict_in_generate": True}
    eager, ours = model.generate(IDS, **cfg), generate(program, IDS, **cfg)
    assert fields <= ours.keys() == eager.keys() - {"past_key_values", "cache"}
    plain = generate(program, IDS, MASK, **OPTIONS, **strategy)
    assert plain.dtype == torch.int64 and torch.equal(plain, eager.sequences)


def test_cfg_goes_over_generation_config_over_the_artifact(model: Any, program: Program) -> None:
    config = GenerationConfig(num_beams=3, max_new_tokens=5, eos_token_id=37, pad_token_id=98, length_penalty=2.0)
    for cfg in ({}, {"num_beams": 2}):
        eager = model.generate(IDS, attention_mask=MASK, generation_config=config, **cfg)
        assert torch.equal(generate(program, IDS, MASK, generation_config=config, **cfg), eager)


class OddOnly(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(0, scores.shape[1], 2), -torch.inf)


class AfterASmallToken(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] < 15


@with_eager
def test_the_callers_processors_and_criteria_act_as_in_eager(
    model: Any, program: Program, strategy: dict[str, Any]
) -> None:
    lists = {
        "logits_processor": LogitsProcessorList([OddOnly()]),
        "stopping_criteria": StoppingCriteriaList([AfterASmallToken()]),
    }
    cfg = {"attention_mask": MASK, **OPTIONS, **strategy, **lists}
    ours = seeded(generate, program, IDS, **cfg)
    assert torch.equal(ours, seeded(model.generate, IDS, **cfg))
    assert (ours[:, T:-1] < 15).any()
    assert [len(each) for each in lists.values()] == [1, 1]


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.parametrize("eos", [None, 40], ids=["to the end", "early"])
def test_a_streamer_hears_the_same_as_from_eager(model: Any, program: Program, eos: int | None) -> None:
    eager, ours = Heard(), Heard()
    cfg = OPTIONS | {"eos_token_id": eos}
    model.generate(IDS[:1], streamer=eager, **cfg)
    generate(program, IDS[:1], streamer=ours, **cfg)
    assert ours.heard == eager.heard
    assert ours.heard[-1] == "end"


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 4}], ids=label)
def test_max_time_ends_texts_after_the_token_at_hand(model: Any, program: Program, strategy: dict[str, Any]) -> None:
    cfg = {"attention_mask": MASK, **OPTIONS, **strategy, "max_time": 0.0}
    ours = generate(program, IDS, **cfg)
    assert ours.shape == (3, T + 1)
    assert torch.equal(ours, model.generate(IDS, **cfg))


@pytest.mark.parametrize("strategy", ["sample", "six samples", "beam sample"])
def test_a_generator_draws_what_torch_seeded_alike_draws_and_alone(program: Program, strategy: str) -> None:
    cfg = OPTIONS | STRATEGIES[strategy] | {"temperature": 2.0}
    expected = seeded(generate, program, IDS, MASK, **cfg)
    before = torch.get_rng_state()
    draws = [
        generate(program, IDS, MASK, **cfg, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] == expected.tolist() != draws[2]
    assert torch.equal(torch.get_rng_state(), before)


# The prompt is read once


@pytest.mark.parametrize("k", [1, 6])
@pytest.mark.parametrize(
    "strategy",
    [
        {"num_beams": 1},
        {"do_sample": True, "num_return_sequences": "k"},
        {"num_beams": "k"},
        {"num_beams": "k", "do_sample": True},
        {"num_beams": "k", "num_beam_groups": "k", "diversity_penalty": 0.5},
    ],
    ids=["greedy", "samples", "beams", "beam sample", "groups"],
)
def test_the_prompt_is_read_once_however_many_texts(program: Program, strategy: dict[str, Any], k: int) -> None:
    # transformers 27449 and 31562: there the prompt is computed once for each beam and sample
    strategy = {name: k if value == "k" else value for name, value in strategy.items()}
    if k == 1:
        strategy.pop("diversity_penalty", None)
    if strategy == {"num_beams": 1}:
        k = 1
    counted, calls = watched(program)
    generate(counted, IDS, MASK, **OPTIONS | strategy | {"eos_token_id": None, "share_prompt": True})
    assert [call.shape for call in calls] == [(3, T)] + [(3, k)] * (NEW - 1)  # 3 prompts of T columns, then k beams


@every_strategy
def test_beams_go_on_at_the_position_after_their_prompt(program: Program, strategy: dict[str, Any]) -> None:
    # transformers' helpers for exported programs feed the prompt's last token twice, or skip a position
    counted, calls = watched(program)
    generate(counted, IDS, MASK, **OPTIONS | strategy | {"eos_token_id": None, "share_prompt": True})
    for i, call in enumerate(calls[1:]):
        assert torch.equal(call.positions, (LENGTHS + i)[:, None].expand(call.shape))


@pytest.mark.parametrize("new, share, rows", [(20, None, 1), (21, None, 4), (20, False, 4), (21, True, 1)])
def test_many_long_samples_have_rows_of_their_own(new: int, share: bool | None, rows: int) -> None:
    # 4 samples of a prompt of 20: up to twice what one text holds, they share its row; `share_prompt` overrides that
    counted, calls = watched(history())
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": new, "share_prompt": share}
    generate(counted, torch.full((1, 20), 7), **options)
    assert [call.shape[0] for call in calls] == [1] + [rows] * (new - 1)


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
@pytest.mark.parametrize("strategy", [{}, STRATEGIES["beams"]], ids=["greedy", "beams"])
def test_a_prompt_may_be_read_in_chunks(program: Program, strategy: dict[str, Any], chunk: int) -> None:
    counted, calls = watched(program)
    chunked = generate(counted, IDS, MASK, **OPTIONS | strategy, prefill_chunk_size=chunk)
    assert torch.equal(chunked, generate(program, IDS, MASK, **OPTIONS | strategy))
    reading = [call.shape[1] for call in calls[: -(-T // chunk)]]
    assert sum(reading) == T and max(reading) <= chunk


def test_beams_share_the_prompt_and_free_the_slots_of_dropped_beams() -> None:
    prompt, new, k = [7] * 300, 60, 6
    counted, calls = watched(history())
    generate(counted, torch.tensor([prompt]), num_beams=k, max_new_tokens=new)
    assert {call.shape[0] for call in calls} == {1}  # one row holds the prompt for all beams
    assert max(call.held for call in calls) < len(prompt) + k * new
    written = torch.cat([call.slots for call in calls[1:]])
    assert len(written.unique()) < written.numel()


def test_cost_follows_the_slots_in_use_not_the_longest_text_allowed() -> None:
    def stop(input_ids: Tensor, scores: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 40)

    held = []
    for most in (40, 2000):
        counted, calls = watched(history())
        generate(counted, torch.ones(1, 8, dtype=torch.long), stopping_criteria=[stop], max_length=most)
        held.append([call.held for call in calls])
    assert held[0] == held[1]


def test_the_loop_stops_when_every_text_has_ended(model: Any, program: Program) -> None:
    counted, calls = watched(program)
    cfg = OPTIONS | {"max_new_tokens": 60, "eos_token_id": list(range(3, 60))}
    ours = generate(counted, IDS, MASK, **cfg)
    assert torch.equal(ours, model.generate(IDS, attention_mask=MASK, **cfg))
    assert len(calls) == ours.shape[1] - T < 60


# Public reports


@pytest.mark.parametrize("strategy", [*list(STRATEGIES.values())[2:], GROUPS], ids=[*list(STRATEGIES)[2:], "groups"])
def test_finished_texts_are_padded_with_0_where_the_pad_is_0(program: Program, strategy: dict[str, Any]) -> None:
    # transformers 47286: eos was written there
    with_98, with_0 = (
        seeded(generate, program, IDS, MASK, **OPTIONS | strategy | {"pad_token_id": pad}) for pad in (98, 0)
    )
    ended = torch.isin(with_98[:, T:], torch.tensor(OPTIONS["eos_token_id"])).cumsum(1)
    padding = (ended.cumsum(1) > 1).long()  # right of the first eos
    assert padding.any()
    assert torch.equal(with_98[:, T:] * padding, 98 * padding)
    assert torch.equal(with_0[:, T:], with_98[:, T:] * (1 - padding))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_there_may_be_more_eos_than_beams(model: Any, program: Program, early_stopping: bool | str) -> None:  # 25103
    cfg = OPTIONS | {"eos_token_id": list(range(40, 60)), "early_stopping": early_stopping}
    cfg |= {"num_beams": 3, "num_return_sequences": 3, "attention_mask": MASK}
    assert torch.equal(generate(program, IDS, **cfg), model.generate(IDS, **cfg))


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.5}], ids=["search", "sample"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_transition_scores_sum_to_the_scores_of_beams(
    model: Any, program: Program, length_penalty: float, sampling: dict[str, Any]
) -> None:  # transformers 15869
    cfg = OPTIONS | sampling | {"num_beams": 4, "num_return_sequences": 4, "length_penalty": length_penalty}
    cfg |= {"eos_token_id": list(range(40, 60)), "early_stopping": True}
    out = seeded(generate, program, IDS, MASK, **cfg, **WHOLE)
    steps = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    lengths = (out.beam_indices >= 0).sum(1)
    assert lengths.min() < lengths.max()  # some ended early
    assert torch.allclose(steps.sum(1), out.sequences_scores * lengths**length_penalty, atol=1e-4)


@pytest.mark.parametrize("strategy", [STRATEGIES["beams"], STRATEGIES["beam sample"], GROUPS], ids=label)
def test_every_step_has_logits_of_every_beam(program: Program, strategy: dict[str, Any]) -> None:  # 37918
    out = generate(program, IDS, MASK, **OPTIONS | strategy | WHOLE)
    for step in (*out.logits, *out.scores):
        assert step.shape == (3 * 6, VOCAB)


@every_strategy
def test_many_calls_leave_nothing_behind(program: Program, strategy: dict[str, Any]) -> None:  # torchtune 1533
    def alive() -> int:
        gc.collect()
        return sum(type(each) is Tensor for each in gc.get_objects())

    counted, calls = watched(program)
    counts: list[tuple[int, int, int]] = []
    for _ in range(6):
        generate(counted, IDS, MASK, **OPTIONS | strategy | WHOLE | {"eos_token_id": None, "max_new_tokens": 4})
        fed, held = len(calls), max(call.held for call in calls)
        calls.clear()
        counts.append((fed, held, alive()))
    assert set(counts[1:]) == {counts[-1]}


# Artifacts


def test_an_exported_program_a_path_and_what_load_returned_are_the_same(
    exported: ExportedProgram, program: Program, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.pt2"
    torch.export.save(exported, file)
    texts = [generate(each, IDS, MASK, **OPTIONS) for each in (exported, program, file, str(file), load(file))]
    assert all(torch.equal(each, texts[0]) for each in texts)


def test_an_artifact_is_opened_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened, open_module = [], ExportedProgram.module

    def module(exported: ExportedProgram, **options: Any) -> Any:
        opened.append(exported)
        return open_module(exported, **options)

    monkeypatch.setattr(ExportedProgram, "module", module)
    exported, file, prompt = exported_history(), tmp_path / "history.pt2", torch.tensor([[3, 1, 4]])
    torch.export.save(exported, file)
    for artifact in (exported, file):
        opened.clear()
        for _ in range(3):
            assert generate(artifact, prompt, max_new_tokens=5)[0, 3:].tolist() == history_oracle([3, 1, 4], 5)
        assert len(opened) == 1


@pytest.fixture(scope="session")
def long() -> tuple[LlamaForCausalLM, Program]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes |= {"max_position_embeddings": 1024, "vocab_size": VOCAB, "initializer_range": 0.15}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return model, load(export_for_generation(model))


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("t", [1, 700])
@pytest.mark.parametrize("b", [1, 5])
def test_one_export_runs_at_any_batch_and_length(long: Any, b: int, t: int, strategy: dict[str, Any]) -> None:
    model, program = long
    ids = torch.randint(VOCAB, (b, t), generator=torch.Generator().manual_seed(b + t))
    cfg = OPTIONS | strategy | {"max_new_tokens": 5}
    assert torch.equal(generate(program, ids, **cfg), model.generate(ids, attention_mask=torch.ones_like(ids), **cfg))


def test_the_model_is_left_as_it_was(model: LlamaForCausalLM, exported: ExportedProgram) -> None:
    fresh = LlamaForCausalLM.from_pretrained(GOLDEN / "tiny-llama", dtype=torch.float32).train()
    before = {name: weight.clone() for name, weight in fresh.state_dict().items()}
    config = fresh.config.to_dict()
    export_for_generation(fresh)
    assert fresh.training and fresh.config.to_dict() == config
    assert fresh.config._attn_implementation == model.config._attn_implementation
    assert all(torch.equal(before[name], weight) for name, weight in fresh.state_dict().items())
    assert all(weight.requires_grad for weight in fresh.parameters())


# Errors, before any work


NOT_THESE: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": ({"input_ids": IDS[:, :0]}, ValueError, "empty"),
    "no prompts": ({"input_ids": IDS[:0]}, ValueError, "empty"),
    "floats": ({"input_ids": IDS.float()}, TypeError, "integers"),
    "a list": ({"input_ids": IDS.tolist()}, TypeError, "tensor"),
    "1-D": ({"input_ids": IDS[0]}, ValueError, r"\[b, t\]"),
    "3-D": ({"input_ids": IDS[None]}, ValueError, r"\[b, t\]"),
    "a token too high": ({"input_ids": IDS + VOCAB}, ValueError, "vocabulary"),
    "a token below 0": ({"input_ids": IDS - VOCAB}, ValueError, "vocabulary"),
    "wrong device": ({"input_ids": IDS.to("meta")}, ValueError, "meta.*cpu"),
    "another mask": ({"attention_mask": MASK[:, 1:]}, ValueError, r"\[3, 8\].*\[3, 9\]"),
    "all padding": ({"attention_mask": MASK * torch.tensor([[1], [0], [1]])}, ValueError, "row 1.*all padding"),
    "right padding": ({"attention_mask": MASK.flip(1)}, ValueError, "row 1.*left"),
    "more than beams": ({"num_beams": 2, "num_return_sequences": 3}, ValueError, "num_beams to 3"),
    "more than greedy": ({"num_return_sequences": 2}, ValueError, "num_return_sequences is 2"),
    "uneven groups": (GROUPS | {"num_beams": 8}, ValueError, "num_beam_groups=3"),
    "positions": ({"max_new_tokens": 249}, ValueError, "256 positions.*max_new_tokens to 248"),
    "unknown": ({"max_tokens": 3}, TypeError, "max_tokens"),
    "not acted on": ({"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens"),
    "lengths": ({"max_length": 30}, ValueError, "max_new_tokens=12 and max_length=30"),
    "least above most": ({"min_new_tokens": 13}, ValueError, "at least"),
    "a prompt of max_length": ({"max_length": 9, "max_new_tokens": None}, ValueError, "max_length"),
    "no temperature": ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature.*do_sample=False"),
}


@pytest.mark.parametrize(("given", "error", "message"), NOT_THESE.values(), ids=NOT_THESE)
def test_mistakes_raise_before_any_work(
    program: Program, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    counted, calls = watched(program)
    with pytest.raises(error, match=message):
        generate(counted, **{"input_ids": IDS, "attention_mask": MASK} | OPTIONS | given)
    assert not calls


def test_a_text_beyond_the_programs_slots_raises_before_any_work() -> None:
    counted, calls = watched(history(max_slots=16))
    with pytest.raises(ValueError, match=r"9 tokens and 12 new .* 16 slots.*max_new_tokens to 8"):
        generate(counted, torch.ones_like(IDS), max_new_tokens=NEW)
    assert not calls


class Doubling(torch.nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return numbers * 2


def test_what_is_no_program_raises_and_says_what_is(tmp_path: Path) -> None:
    doubling = torch.export.export(Doubling(), (torch.ones(2),))
    torch.export.save(doubling, tmp_path / "doubling.pt2")
    (tmp_path / "text.pt2").write_text("no program")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps([1]))
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pt")
    torch.jit.save(torch.jit.script(Doubling()), tmp_path / "script.pt")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("a", "b")
    for name in ("text.pt2", "pickle.pt", "weights.pt", "script.pt", "other.zip"):
        with pytest.raises(ValueError, match=rf"{name}.*supported.*torch\.export\.save"):
            generate(tmp_path / name, IDS)
    for program in (doubling, tmp_path / "doubling.pt2"):
        with pytest.raises(ValueError, match=r"signature.*numbers"):
            generate(program, IDS)
    with pytest.raises(FileNotFoundError, match=r"missing\.pt2"):
        generate(tmp_path / "missing.pt2", IDS)
    with pytest.raises(TypeError, match=r"Doubling.*ExportedProgram"):
        generate(Doubling(), IDS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [1, 2], ids=["in the prompt", "later"])
@every_strategy
def test_logits_that_are_no_numbers_raise(strategy: dict[str, Any], at: int, bad: float) -> None:
    logits = torch.eye(5).roll(1, 1) * 50  # after token n comes n + 1
    logits[at, 0] = bad
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        generate(table(logits), torch.tensor([[0, 1]]), max_new_tokens=4, **strategy)
