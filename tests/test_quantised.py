"""Weights that torchao quantised to int8: exported, saved and compiled, the tokens are the quantised model's own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import label, tiny
from torch import Tensor
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from exgen import compile_for_generation, export_for_generation, generate

STRATEGIES: list[dict[str, Any]] = [
    {},
    {"num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 2},
]
KINDS = ("exported", "compiled")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    model = tiny("llama")
    quantize_(model, Int8WeightOnlyConfig())
    exported = export_for_generation(model)
    folder = tmp_path_factory.mktemp("quantised")
    torch.export.save(exported, folder / "exported.pt2")
    return model, {
        "exported": folder / "exported.pt2",
        "compiled": compile_for_generation(exported, folder / "compiled.pt2"),
    }


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(90, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) >= torch.tensor([[0], [3], [8]])
    return ids.where(mask, 97), mask.long()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
@pytest.mark.parametrize("kind", KINDS)
def test_the_quantised_models_tokens(quantised: tuple[Any, dict[str, Path]], kind: str, strategy: dict) -> None:
    model, files = quantised
    ids, mask = prompts()
    cfg = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 97} | strategy
    torch.manual_seed(3)
    expected = model.generate(ids, attention_mask=mask, **cfg)
    torch.manual_seed(3)
    assert generate(files[kind], ids, mask, **cfg).tolist() == expected.tolist()


def test_the_model_given_keeps_its_quantised_weights(quantised: tuple[Any, dict[str, Path]]) -> None:
    model, _ = quantised
    assert {type(layer.weight).__name__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)} == {
        "Int8Tensor"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_answers_the_same(quantised: tuple[Any, dict[str, Path]], kind: str) -> None:
    model, files = quantised
    ids = prompts()[0][:1]
    code = f"""
import json, torch
from exgen import generate
ids = torch.tensor({ids.tolist()})
print(json.dumps(generate({str(files[kind])!r}, ids, max_new_tokens=10, do_sample=False).tolist()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == model.generate(ids, max_new_tokens=10, do_sample=False).tolist()


def test_the_package_holds_integers(quantised: tuple[Any, dict[str, Path]], tmp_path: Path) -> None:
    """A layer whose weights outweigh all but the code."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).eval()
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    quantize_(model, Int8WeightOnlyConfig())
    package = compile_for_generation(export_for_generation(model), tmp_path / "int8.pt2")
    assert package.stat().st_size < 2 * weights  # in float32, four times them
