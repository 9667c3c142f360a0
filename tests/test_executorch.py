"""ExecuTorch: a step program lowered with XNNPACK and run by its runtime answers as eager does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import CASES, answers, ours, shallow, theirs
from tiny import label

from examples.executorch import lower
from exgen import export_for_generation, generate

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = ["llama", "gpt2"]


@pytest.fixture(scope="module", params=MODELS)
def lowered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, file = shallow(request.param), tmp_path_factory.mktemp("executorch") / "tiny.pte"
    return model, lower(export_for_generation(model), file, tokens=5, slots=24, rows=4)


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_answers_as_eager_does(lowered: tuple[Any, Path], case: str) -> None:
    model, file = lowered
    assert answers(ours(file), [case]) == answers(theirs(model), [case])


@pytest.mark.parametrize("cfg", [{"num_beams": 6}, {"num_beams": 3, "do_sample": True}], ids=label)
def test_beams_beyond_the_rows_of_a_call(lowered: tuple[Any, Path], cfg: dict[str, Any]) -> None:
    model, file = lowered
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])  # more tokens than a call takes
    cfg = {"max_new_tokens": 8, "do_sample": False} | cfg
    torch.manual_seed(3)
    expected = model.generate(ids, **cfg)
    torch.manual_seed(3)
    assert generate(file, ids, **cfg).tolist() == expected.tolist()


def test_a_text_as_long_as_the_slots_and_one_longer(lowered: tuple[Any, Path]) -> None:
    model, file = lowered
    ids = torch.arange(5, 25)[None]  # 20 tokens, 24 slots: the last of 5 new ones is never fed
    cfg = {"do_sample": False, "eos_token_id": None}
    assert (
        generate(file, ids, max_new_tokens=5, **cfg).tolist() == model.generate(ids, max_new_tokens=5, **cfg).tolist()
    )
    with pytest.raises(ValueError, match=r"20 tokens and 6 new.*24 slots"):
        generate(file, ids, max_new_tokens=6, **cfg)
