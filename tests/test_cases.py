"""Faults that users of `generate`, exported programs and beam search reported elsewhere, each as a small case on toys.

The numbers in the names are those reports' issues. `history` answers to every slot it sees, so what is doubled, missing
or out of order changes its texts; without `free_slots` it has no mask and takes slots in order only.
"""

import math
from typing import Any

import pytest
import torch
from tiny import label
from torch import Tensor
from toys import VOCAB, exported_history, history, history_oracle, table, watched

import exgen
from exgen import Program, load

torch.set_num_threads(1)
generate: Any = exgen.generate  # a tensor or an output, as the options say
PROMPT = [3, 1, 4, 1, 5, 9]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "beams": {"num_beams": 4},
    "beam sample": {"do_sample": True, "num_beams": 4},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
}
PROGRAMS = {
    "with a mask": history,
    "without a mask": lambda: history(free_slots=False),
    "exported": lambda: load(exported_history()),
}
every_program = pytest.mark.parametrize("open_program", PROGRAMS.values(), ids=PROGRAMS)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def text(program: Program, prompt: list[int], **cfg: Any) -> list[int]:
    """The new tokens of one prompt."""
    return generate(program, torch.tensor([prompt]), **GREEDY | cfg)[0, len(prompt) :].tolist()


def padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    t = max(map(len, prompts))
    ids = torch.tensor([[0] * (t - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (t - len(prompt)) + [1] * len(prompt) for prompt in prompts])


@every_program
def test_a_call_leaves_nothing_behind_even_one_that_failed(open_program: Any) -> None:  # 30351, executorch 21979
    program = open_program()
    first = text(program, PROMPT)
    text(program, PROMPT[:2])

    def fail_at_last() -> None:
        if len(calls) == 3:
            raise InterruptedError

    failing, calls = watched(program, fail_at_last)
    with pytest.raises(InterruptedError):
        text(failing, PROMPT[:2])
    assert text(program, PROMPT) == first == history_oracle(PROMPT, 8)


@every_program
def test_the_first_token_is_right_and_each_position_is_written_once(open_program: Any) -> None:
    program, calls = watched(open_program())
    assert text(program, PROMPT) == history_oracle(PROMPT, 8)
    positions = torch.cat([call.positions for call in calls], 1)[0].tolist()
    assert positions == list(range(len(PROMPT) + 7))  # the last token is chosen, not fed
    assert len(set(torch.cat([call.slots for call in calls], 1)[0].tolist())) == len(positions)


@pytest.mark.parametrize("free_slots", [True, False])
def test_a_text_that_does_not_fit_is_refused_before_any_work(free_slots: bool) -> None:  # 35626, torchchat 1395
    program, calls = watched(history(free_slots=free_slots, max_slots=16))
    prompt = list(range(10))
    with pytest.raises(ValueError, match=r"10 tokens and 8 new .* holds 16 slots.*max_new_tokens to 7"):
        text(program, prompt)
    assert not calls
    assert text(program, prompt, max_new_tokens=7) == history_oracle(prompt, 7)
    beams = text(history(), prompt, max_new_tokens=7, num_beams=3)
    assert text(program, prompt, max_new_tokens=7, num_beams=3) == beams
    assert max(call.held for call in calls) <= 16


@pytest.mark.parametrize("t", [1, 50])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_scores_are_means_over_new_tokens_only(t: int, new: int) -> None:  # 26624
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    cfg = GREEDY | outputs | {"max_new_tokens": new, "num_beams": 3, "num_return_sequences": 3, "length_penalty": 1.0}
    scores = generate(table(torch.zeros(VOCAB, VOCAB)), torch.ones(1, t, dtype=torch.long), **cfg).sequences_scores
    assert torch.allclose(scores, torch.full((3,), -math.log(VOCAB)))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a_beam_may_end_at_its_first_token(early_stopping: bool | str) -> None:  # 8722, lightseq 236
    eos, logits = 7, torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, eos] = -9.0
    logits[1, eos] = 9.0
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    cfg = GREEDY | outputs | {"num_beams": 4, "eos_token_id": eos, "pad_token_id": 0, "early_stopping": early_stopping}
    both = generate(table(logits), torch.tensor([[5, 1], [5, 2]]), **cfg)
    assert both.sequences[0].tolist() == [5, 1, eos] + [0] * (both.sequences.shape[1] - 3)
    assert both.sequences_scores[0] == pytest.approx(float(logits[1].log_softmax(-1)[eos]))
    alone = generate(table(logits), torch.tensor([[5, 2]]), **cfg)
    assert torch.equal(both.sequences[1:], alone.sequences)
    assert both.sequences_scores[1] == pytest.approx(float(alone.sequences_scores[0]))


@pytest.mark.parametrize("strategy", [STRATEGIES["beams"], STRATEGIES["groups"]], ids=["beams", "groups"])
def test_beams_live_on_where_all_best_tokens_end_a_text(strategy: dict[str, Any]) -> None:  # 25103, 34168
    ends = list(range(11))
    logits = torch.arange(VOCAB, 0, -1.0).repeat(VOCAB, 1)
    program, calls = watched(table(logits))
    new = text(program, [15], **strategy, eos_token_id=ends, early_stopping="never", length_penalty=3.0)
    fed = torch.cat([call.tokens for call in calls[1:]])
    assert fed.shape == (7, 4) and not torch.isin(fed, torch.tensor(ends)).any()
    assert len(new) == 8


@pytest.mark.parametrize("strategy", ["greedy", "beams", "groups"])
@pytest.mark.parametrize("lengths", [(2, 5, 9, 5), (1, 32)], ids=label)
@every_program
def test_left_padded_prompts_answer_as_each_alone(open_program: Any, lengths: tuple[int, ...], strategy: str) -> None:
    # 22707, 30670, 47651: the last pads 31 columns before one token
    program, prompts = open_program(), [[(3 * i + n) % VOCAB for i in range(n)] for n in lengths]
    ids, mask = padded(prompts)
    together = generate(program, ids, mask, **GREEDY, **STRATEGIES[strategy])[:, ids.shape[1] :].tolist()
    assert together == [text(program, prompt, **STRATEGIES[strategy]) for prompt in prompts]
    if strategy == "greedy":
        assert together == [history_oracle(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("strategy", ["sample", "beam sample"])
def test_padding_does_not_change_what_is_drawn(strategy: str) -> None:
    cfg = GREEDY | STRATEGIES[strategy] | {"return_dict_in_generate": True, "output_scores": True, "temperature": 5.0}
    ids, mask = padded([PROMPT, [0] * 31])
    tight, wide = (
        generate(history(), *inputs, **cfg, generator=torch.Generator().manual_seed(0))
        for inputs in ((ids[:1, -len(PROMPT) :], None), (ids[:1], mask[:1]))
    )
    assert tight.sequences[0].tolist() == wide.sequences[0, -len(PROMPT) - 8 :].tolist()
    assert torch.allclose(torch.stack(tight.scores), torch.stack(wide.scores))


@every_strategy
def test_no_token_but_the_allowed_one_is_chosen(strategy: dict[str, Any]) -> None:  # 22890, GENRE 51
    def next_number(_: int, ids: Tensor) -> list[int]:
        return [(int(ids[-1]) + 1) % VOCAB]

    assert text(history(), PROMPT, **strategy, prefix_allowed_tokens_fn=next_number) == list(range(10, 18))
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn"):
        text(history(), PROMPT, **strategy, prefix_allowed_tokens_fn=lambda _, ids: [])


def test_groups_that_pay_enough_differ_at_once() -> None:  # 24407, 24456
    cfg = {"num_beams": 2, "num_beam_groups": 2, "num_return_sequences": 2}
    ids = torch.tensor([PROMPT])
    first, second = generate(history(), ids, **GREEDY, **cfg, diversity_penalty=1e6)[:, len(PROMPT)].tolist()
    assert first != second
    with pytest.raises(ValueError, match="diversity_penalty"):
        generate(history(), ids, **cfg, diversity_penalty=0.0)


def test_an_unknown_option_raises() -> None:  # 7656
    with pytest.raises(TypeError, match="num_beans: did you mean num_beams"):
        text(history(), PROMPT, num_beans=4)


@pytest.mark.parametrize("strategy", ["sample", "beam sample"])
def test_a_generator_decides_alone(strategy: str) -> None:  # 24021
    before = torch.get_rng_state()
    ids, cfg = torch.tensor([PROMPT]), GREEDY | STRATEGIES[strategy] | {"temperature": 5.0}
    draws = [
        generate(history(), ids, **cfg, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (42, 42, 43)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_streamer_with_beams_is_refused() -> None:
    class Streamer:
        def put(self, ids: Tensor) -> None: ...
        def end(self) -> None: ...

    with pytest.raises(ValueError, match=r"streamer.*num_beams=1"):
        text(history(), PROMPT, num_beams=4, streamer=Streamer())


@pytest.mark.parametrize("eos", [None, [0], [0, 1]], ids=label)
@pytest.mark.parametrize("v", [2, 3, 5])
@every_strategy
def test_a_vocabulary_may_be_smaller_than_the_candidates(strategy: dict[str, Any], v: int, eos: Any) -> None:
    logits = torch.randn(v, v, generator=torch.Generator().manual_seed(v))
    ids = generate(table(logits), torch.ones(2, 1, dtype=torch.long), **GREEDY | strategy | {"eos_token_id": eos})
    assert ids.shape[0] == 2 and ids.max() < v


@pytest.mark.parametrize("strategy", ["beams", "groups"])
def test_beams_that_share_a_row_answer_as_beams_in_rows_of_their_own(strategy: str) -> None:
    cfg = GREEDY | STRATEGIES[strategy] | {"max_new_tokens": 40, "num_return_sequences": 4}
    cfg |= {"return_dict_in_generate": True, "output_scores": True}
    ids, mask = padded([PROMPT, PROMPT[:3], PROMPT[1:]])
    shared, apart = (generate(history(free_slots=free), ids, mask, **cfg) for free in (True, False))
    assert torch.equal(shared.sequences, apart.sequences)
    assert torch.equal(shared.beam_indices, apart.beam_indices)
    assert torch.allclose(shared.sequences_scores, apart.sequences_scores)
