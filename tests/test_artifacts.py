"""Artifacts of other recipes, made for real, saved, opened in a fresh process: the texts are those of eager."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from artifacts import CASES, KINDS, answers
from tiny import tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
Answers = dict[str, dict[str, list[list[int]]]]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What a fresh process answers to each kind, from its file."""
    folder = tmp_path_factory.mktemp("artifacts")
    for kind, (model, make) in KINDS.items():
        with torch.no_grad():
            torch.export.save(make(tiny(model)), folder / f"{kind}.pt2")
    script = Path(__file__).with_name("artifacts.py")
    paths = [str(script.parent), str(script.parent.parent)]
    code = f"import sys, runpy; sys.path[:0] = {paths}; sys.argv = ['', {str(folder)!r}]; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
    return json.loads((folder / "answers.json").read_text())


@cache
def eager(model: str) -> dict[str, list[list[int]]]:
    return answers(tiny(model).generate)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_answers_as_eager(kind: str, case: str, answered: Answers) -> None:
    assert answered[kind][case] == eager(KINDS[kind][0])[case]
