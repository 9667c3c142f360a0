"""ExecuTorch: a step program lowered with XNNPACK and run by its runtime answers as eager does."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import CASES, SLOTS, answers, ours, shallow, start, theirs
from tiny import label
from transformers import GenerationConfig

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


def test_a_fresh_process_answers_the_same(lowered: tuple[Any, Path]) -> None:
    model, file = lowered
    code = f"""
import json, torch
from exgen import generate
print(json.dumps(generate({str(file)!r}, torch.tensor([[5, 6, 7]]), num_beams=4, max_new_tokens=6).tolist()))
"""
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    expected = model.generate(torch.tensor([[5, 6, 7]]), num_beams=4, max_new_tokens=6, do_sample=False)
    assert json.loads(run.stdout.splitlines()[-1]) == expected.tolist(), run.stderr


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
    cfg: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    assert (
        generate(file, ids, max_new_tokens=5, **cfg).tolist() == model.generate(ids, max_new_tokens=5, **cfg).tolist()
    )
    with pytest.raises(ValueError, match=r"20 tokens and 6 new.*24 slots"):
        generate(file, ids, max_new_tokens=6, **cfg)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A program with its cache inside: tokens [1, s], and the first one's position [1]."""
    from executorch.backends.xnnpack.partition import xnnpack_partitioner  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower  # type: ignore[import-not-found, import-untyped, unused-ignore]

    model, file = shallow("llama"), tmp_path_factory.mktemp("hidden") / "hidden.pte"
    with torch.no_grad():
        edge = to_edge_transform_and_lower(
            start(model),
            partitioner=[xnnpack_partitioner.XnnpackPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods={"get_max_seq_len": SLOTS},
        )
    file.write_bytes(edge.to_executorch().buffer)
    return model, file


def test_one_text_of_a_hidden_cache(hidden: tuple[Any, Path]) -> None:
    model, file = hidden
    for ids in ([[5, 6, 7, 8, 9]], [[7, 8]], [[5, 6, 7, 8, 9]]):
        for cfg in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            torch.manual_seed(3)
            expected = model.generate(torch.tensor(ids), max_new_tokens=8, **cfg)
            torch.manual_seed(3)
            answer: Any = generate(file, torch.tensor(ids), max_new_tokens=8, **cfg)
            assert answer.tolist() == expected.tolist()


def test_two_threads_of_one_hidden_cache(hidden: tuple[Any, Path]) -> None:
    model, file = hidden
    texts = [torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[7, 8]])] * 2
    cfg: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda ids: generate(file, ids, **cfg), texts))
    for ids, answer in zip(texts, found, strict=True):
        assert torch.equal(torch.as_tensor(answer), model.generate(ids, **cfg))


@pytest.mark.parametrize(
    "ids, cfg", [([[5, 6]], {"num_beams": 4}), ([[5, 6], [7, 8]], {}), ([[5, 6], [97, 8]], {})], ids=label
)
def test_more_texts_of_a_hidden_cache_are_refused(hidden: tuple[Any, Path], ids: list, cfg: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="export_for_generation"):
        generate(hidden[1], torch.tensor(ids), max_new_tokens=4, do_sample=False, **cfg)


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The folder that transformers' own exporter saves: a program that is handed its static cache."""
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

    model, folder = shallow("llama"), tmp_path_factory.mktemp("transformers")
    ids = torch.randint(90, (1, 5))
    exported = ExecutorchExporter().export_for_generation(
        model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        ExecutorchConfig(dynamic=True, backend="xnnpack"),
        generation_config=GenerationConfig(cache_implementation="static"),
        multi_token_decode=True,
    )
    exported.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_lowers_answers_as_eager_does(of_transformers: tuple[Any, Path], case: str) -> None:
    model, folder = of_transformers
    assert answers(ours(folder), [case]) == answers(theirs(model), [case])
    assert answers(ours(folder / "decode.pte"), [case]) == answers(theirs(model), [case])
