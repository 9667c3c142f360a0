"""Tiny random models, wide enough that their logits differ and texts end: one per architecture that tests compare."""

import copy
import re
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 99
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 97, "bos_token_id": 96, "eos_token_id": 98, "initializer_range": 0.15}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 192}
_GROUPED = {**_COMMON, **_SIZES, "intermediate_size": 96, "num_key_value_heads": 2}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "gpt2": GPT2Config(**_COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=192),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=16),
    "gemma2": Gemma2Config(**_GROUPED, head_dim=16, sliding_window=7, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(
        **_GROUPED, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral": MistralConfig(**_GROUPED, head_dim=16, sliding_window=7),
    "opt": OPTConfig(**_COMMON, **_SIZES, ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=True, init_std=0.15),
    "gpt_neox": GPTNeoXConfig(**_COMMON, **_SIZES, intermediate_size=96),
}


def tiny(name: str) -> PreTrainedModel:
    """A tiny random float32 model in eval mode, the same weights every time."""
    torch.manual_seed(0)
    # a copy of its config: transformers 4.57's recipes leave an attention without sliding windows in the one they see
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    for parameter in model.parameters():  # some architectures ignore initializer_range for what is not a matrix
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.mean().round()), std=0.05)
    return model


def label(value: Any) -> str:
    """A test's name for `value`, the same in every process: without addresses, sets in order."""
    return str(sorted(value)) if isinstance(value, set) else re.sub(r" at 0x\w+", "", str(value))
