"""The compiled package: one file, one copy of the weights, the same texts as eager in both layouts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import label, tiny
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from exgen import compile_for_generation, export_for_generation, generate

MODELS = ["llama", "gpt2", "gemma3"]  # linear layers without a bias; none at all; windows
STRATEGIES: list[dict[str, Any]] = [
    {},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.5},
    {"num_beams": 20},  # more tokens a step than the entry point for few takes
    {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    {"do_sample": True, "num_beams": 3},
]


@pytest.fixture(scope="module", params=MODELS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = tiny(request.param)
    return model, compile_for_generation(export_for_generation(model), tmp_path_factory.mktemp("compiled") / "tiny.pt2")


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(90, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) >= torch.tensor([[0], [3], [8]])
    return ids.where(mask, 97), mask.long()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_a_package_continues_as_eager_does(compiled: tuple[Any, Path], strategy: dict[str, Any]) -> None:
    model, package = compiled
    ids, mask = prompts()
    cfg = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_scores": True} | strategy
    torch.manual_seed(3)
    expected = model.generate(ids, attention_mask=mask, **cfg)
    torch.manual_seed(3)
    answer: Any = generate(package, ids, mask, **cfg)
    assert answer.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(answer.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_one_text_alone_has_an_entry_point_of_its_own(compiled: tuple[Any, Path]) -> None:
    model, package = compiled
    ids, _ = prompts()
    expected = model.generate(ids[:1], max_new_tokens=10, do_sample=False)
    assert generate(package, ids[:1], max_new_tokens=10, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("chunk", [None, 64, 81, 127], ids=str)
def test_long_prompts_are_read_in_pieces_of_chunks(compiled: tuple[Any, Path], chunk: int | None) -> None:
    """From 64 tokens on, another entry point reads them; here in one chunk or several, the last one short or long."""
    model, package = compiled
    generator = torch.Generator().manual_seed(2)
    mask = torch.arange(150) >= torch.tensor([[0], [13], [142]])
    ids = torch.randint(90, (3, 150), generator=generator).where(mask, 97)
    cfg = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2} | {"return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=mask.long(), **cfg, output_logits=True)
    answer: Any = generate(package, ids, mask, **cfg, output_logits=True, prefill_chunk_size=chunk)
    assert answer.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(answer.logits[0], expected.logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=label)
def test_texts_in_rows_of_their_own_are_the_same(compiled: tuple[Any, Path], strategy: dict[str, Any]) -> None:
    _, package = compiled
    ids, mask = prompts()
    answers = []
    for share in (True, False):
        torch.manual_seed(3)
        cfg = {"max_new_tokens": 10, "do_sample": False, "share_prompt": share} | strategy
        answers.append(generate(package, ids, mask, **cfg).tolist())
    assert answers[0] == answers[1]


def test_the_weights_are_in_the_package_once(tmp_path: Path) -> None:
    """A model whose weights outweigh its code: the package is hardly larger than they are."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    package = compile_for_generation(export_for_generation(model), tmp_path / "weights.pt2")
    assert package.stat().st_size < 1.1 * weights


def test_a_package_runs_where_the_model_is_unknown(compiled: tuple[Any, Path]) -> None:
    model, package = compiled
    code = f"""
import sys, torch
from exgen import generate
print(generate({str(package)!r}, torch.tensor([[5, 6, 7]]), num_beams=2, max_new_tokens=4, do_sample=False).tolist())
assert not any("modeling_" in name and "utils" not in name for name in sys.modules), "model code was imported"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    expected = model.generate(torch.tensor([[5, 6, 7]]), num_beams=2, max_new_tokens=4, do_sample=False)
    assert run.stdout.strip() == str(expected.tolist()), run.stderr


def test_what_cannot_be_compiled_raises(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(ValueError, match="export_for_generation"):
        compile_for_generation(torch.export.export(Plain(), (torch.ones(2),)), tmp_path / "plain.pt2")
    with pytest.raises(ValueError, match=r"\.pt2"):
        compile_for_generation(export_for_generation(tiny("llama")), tmp_path / "package.zip")
