"""Models that keep states besides keys and values: their beams and batches are what the model computes without a cache.

transformers 29730 and 46612: beams on such models were silently wrong, as their states were not reordered.
"""

from typing import Any

import pytest
import torch
import transformers
from tiny import label
from torch import Tensor
from torch.export import ExportedProgram
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from exgen import compile_for_generation, export_for_generation, generate

COMMON = {"vocab_size": 99, "pad_token_id": 97, "bos_token_id": 96, "eos_token_id": 98, "initializer_range": 0.15}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "lfm2": {**SIZES, **HEADS, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {**SIZES, **HEADS, **LINEAR, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
}
STRATEGIES: list[dict[str, Any]] = [{}, {"num_beams": 4, "num_return_sequences": 2}]
LENGTHS = (9, 4, 1)
READABLE = int(transformers.__version__.split(".")[0]) >= 5  # older caches keep such states each in a way of its own


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**COMMON, **CONFIGS[name])).eval()


@pytest.fixture(scope="module", params=CONFIGS if READABLE else [])
def exported(request: pytest.FixtureRequest) -> tuple[Any, ExportedProgram]:
    model = model_of(request.param)
    return model, export_for_generation(model)


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(90, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return ids.where(mask, 97), mask.long()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_each_prompt_of_a_batch_goes_on_as_alone(
    exported: tuple[Any, ExportedProgram], strategy: dict[str, Any]
) -> None:
    model, program = exported
    ids, mask = prompts()
    cfg = {"max_new_tokens": 8, "do_sample": False} | strategy
    n = cfg.get("num_return_sequences", 1)
    texts: Any = generate(program, ids, mask, **cfg)
    for i, length in enumerate(LENGTHS):
        alone = model.generate(ids[i : i + 1, -length:], use_cache=False, **cfg)[:, length:]
        new = texts[i * n : (i + 1) * n, ids.shape[1] :]
        assert new[:, : alone.shape[1]].tolist() == alone.tolist()
        assert set(new[:, alone.shape[1] :].flatten().tolist()) <= {97}


def test_samples_under_one_seed(exported: tuple[Any, ExportedProgram]) -> None:
    model, program = exported
    ids = prompts()[0][:1]
    cfg: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(3)
    expected = model.generate(ids, use_cache=False, **cfg)
    torch.manual_seed(3)
    assert generate(program, ids, **cfg).tolist() == expected.tolist()


def test_a_second_call_starts_from_nothing(exported: tuple[Any, ExportedProgram]) -> None:
    _, program = exported
    first, second = (generate(program, prompts()[0][:1], max_new_tokens=8, do_sample=False) for _ in range(2))
    assert first.tolist() == second.tolist()


def test_compiling_says_that_it_cannot(exported: tuple[Any, ExportedProgram]) -> None:
    with pytest.raises(ValueError, match="states"):
        compile_for_generation(exported[1], "states.pt2")


@pytest.mark.parametrize("name", [] if READABLE else ["mamba", "lfm2"])
def test_caches_of_transformers_4_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="other states"):
        export_for_generation(model_of(name))
