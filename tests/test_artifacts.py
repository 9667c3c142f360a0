"""Artifacts of other recipes, made for real, saved, opened in a fresh process: the texts are those of eager."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import (
    CASES,
    KINDS,
    LONGEST,
    NEW,
    PACKAGES,
    SLOTS,
    Windows,
    answers,
    compiled,
    counting,
    decoder_only,
    exported_model,
    input_pos,
    ours,
    shallow,
    theirs,
)
from tiny import tiny
from toys import exported_history, watched
from transformers import PreTrainedModel

from exgen import Program, generate, load

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
Answers = dict[str, dict[str, list[list[list[int]]]]]  # by kind and case: what each of two threads got


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of each kind."""
    folder = tmp_path_factory.mktemp("artifacts")
    for kind, (model, make) in KINDS.items():
        with torch.no_grad():
            torch.export.save(make(tiny(model)), folder / f"{kind}.pt2")
    for kind, (model, make) in PACKAGES.items():
        with torch.no_grad():
            compiled(make(shallow(model)), folder / f"{kind}.pt2")
    return folder


@pytest.fixture(scope="module")
def answered(folder: Path) -> Answers:
    """What a fresh process answers to each kind, from its file."""
    script = Path(__file__).with_name("artifacts.py")
    paths = [str(script.parent), str(script.parent.parent)]
    code = f"import sys, runpy; sys.path[:0] = {paths}; sys.argv = ['', {str(folder)!r}]; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
    return json.loads((folder / "answers.json").read_text())


@cache
def eager(model: str, make: Callable[[str], PreTrainedModel] = tiny) -> dict[str, list[list[int]]]:
    return answers(theirs(make(model)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_answers_as_eager(kind: str, case: str, answered: Answers) -> None:
    """Two threads ask at once, in opposite orders, so that calls on one program follow and meet others."""
    assert answered[kind][case] == [eager(KINDS[kind][0])[case]] * 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", PACKAGES)
def test_a_package_answers_as_eager(kind: str, case: str, answered: Answers) -> None:
    assert answered[kind][case] == [eager(PACKAGES[kind][0], shallow)[case]] * 2


def check_limits(program: Program, model: PreTrainedModel, slots: int) -> None:
    """Texts of up to `slots` tokens fit, the last one not counted, which is never fed."""
    program, calls = watched(program)
    ids = torch.randint(90, (1, slots + 1), generator=torch.Generator().manual_seed(2))
    settings: dict[str, Any] = {"eos_token_id": None, "do_sample": False}
    refused = [
        (slots + 1, 1, rf"{slots + 1} tokens and 1 new .* {slots} slots: shorten"),
        (slots - 4, 6, "to 5 or less"),
    ]
    for t, new, message in refused:
        with pytest.raises(ValueError, match=message):
            generate(program, ids[:, :t], max_new_tokens=new, **settings)
    assert not calls
    for t, new, k in [(slots, 1, 1), (slots - 4, 5, 3)]:
        cfg = {"max_new_tokens": new, "num_beams": k} | settings
        assert generate(program, ids[:, :t], **cfg).tolist() == model.generate(ids[:, :t], **cfg).tolist()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("exporter", "step program"))])
def test_a_text_as_long_as_the_cache_works_and_a_longer_one_is_refused(kind: str, folder: Path) -> None:
    slots = LONGEST if kind.startswith("no cache") and "fixed" not in kind else SLOTS
    check_limits(load(folder / f"{kind}.pt2"), tiny(KINDS[kind][0]), slots)


@pytest.mark.parametrize("kind", ["package, decoder only, many tokens", "package, input_pos, one token"])
def test_a_text_as_long_as_a_package_s_cache_works_and_a_longer_one_is_refused(kind: str, folder: Path) -> None:
    check_limits(load(folder / f"{kind}.pt2"), shallow(PACKAGES[kind][0]), SLOTS)


def test_a_package_with_windows_that_move_on_holds_one_window(tmp_path: Path) -> None:
    """Whether it moves on is seen where a text has no slot left; compiled code may crash there."""
    model = tiny("mistral")
    package = compiled(input_pos(tiny("mistral"), s=1, kind=Windows), tmp_path / "windows.pt2")
    check_limits(load(package), model, model.config.sliding_window)


def test_a_package_whose_state_never_updates_is_refused(tmp_path: Path) -> None:
    """PyTorch issue 165444: a counter of one element is 1 after every call. Compilers with that fixed are believed."""
    package = compiled(counting(shallow("llama")), tmp_path / "counting.pt2")
    runner = torch._inductor.aoti_load_package(package)
    logits = torch.cat([runner(torch.tensor([[token]])) for token in (5, 6, 7)], 1)
    if torch.allclose(logits, shallow("llama")(torch.tensor([[5, 6, 7]])).logits, atol=1e-4):
        assert answers(ours(package)) == eager("llama", shallow)
    else:
        with pytest.raises(ValueError, match=r"writes .*count.* forgets tokens.*compile_for_generation"):
            load(package)


def test_a_package_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    table = torch.export.export(torch.nn.Embedding(9, 9), (torch.zeros(1, 1, dtype=torch.long),))
    package = compiled(table, tmp_path / "one.pt2")
    with pytest.raises(ValueError, match=r"takes one token and keeps nothing.*export_for_generation"):
        load(package)


def test_a_step_program_packaged_without_its_metadata_says_how_to_add_it(tmp_path: Path) -> None:
    program = exported_history()
    del program.graph_module.meta["custom"]
    with pytest.raises(ValueError, match=r"compile_for_generation, or pass inductor_configs=.*aot_inductor.metadata"):
        load(compiled(program, tmp_path / "bare.pt2"))


if not NEW:

    def test_a_hybrid_cache_is_as_long_as_its_window() -> None:
        model = tiny("gemma3")
        check_limits(load(decoder_only(tiny("gemma3"), s=1, strict=False)), model, model.config.sliding_window)


if NEW:

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_an_exported_model_answers_as_eager(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """transformers' ExportedModel: the object, the folder it was saved to, and what is loaded from there."""
        model = exported_model(tiny("llama"), cache == "static", multi=True)
        model.save_pretrained(tmp_path)
        # torch warns of the example inputs it unpickles by a message that cannot be formatted
        monkeypatch.setattr(logging.getLogger("torch._export.serde.serialize"), "disabled", True)
        for exported in (model, tmp_path, type(model).from_pretrained(tmp_path, trust_remote_code=True)):
            assert answers(ours(exported)) == eager("llama")

    def test_an_exported_model_brings_its_generation_config(tmp_path: Path) -> None:
        source = tiny("llama")
        source.generation_config.update(num_beams=4, num_return_sequences=2, max_new_tokens=6)
        model = exported_model(source, static=False, multi=True)
        model.generation_config = source.generation_config  # the exporter keeps only one that it is given
        model.save_pretrained(tmp_path)
        ids = torch.tensor([[5, 6, 7]])
        for exported in (model, tmp_path):
            assert generate(exported, ids).tolist() == source.generate(ids).tolist()
