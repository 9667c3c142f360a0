"""docs/coverage.md: which architectures of transformers' causal-LM mapping exgen exports and generates with.

    OMP_NUM_THREADS=1 python bench/coverage.py [--minutes 2] [--again CAUSE_OR_NAME ...]

Each is built tiny and random from its own config class, run by transformers' `generate`, exported, run by ours, and
compared: greedy and 4 beams, two prompts, one left-padded. Each runs in a process of its own with a time limit.
Outcomes are appended to bench/coverage.jsonl, so that a run continues the one before.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import exgen  # noqa: E402

OUTCOMES = HERE / "coverage.jsonl"
SECONDS = 60
WORKS = "works"
NOT_RUN = "transformers' own `generate` does not run it"
STATES = "its cache holds states that are no slots"
UNTRACEABLE = "torch.export cannot trace it"
OTHER_LOGITS = "no way of attending through slots gives the model's logits"
SLOW = f"not done in {SECONDS} s"
OTHER = "other"

# What a size is in a tiny model, by the first pattern that its name matches.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size.*|n_vocab", 99),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"(eos|sep)_token_id", 2),
    (r".*_token_(id|index)", 3),
    (r"(initializer_range|init_std|initializer_factor|embedding_initializer_range)", 0.15),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length", 128),
    (r"sliding_window|window_size|attention_window|attention_chunk_size|sliding_window_size", 7),
    (r"num_(hidden_|decoder_|encoder_)?layers|n_layers?|(en|de)coder_layers|depth", 2),
    (r"num_(key_value|kv|global_key_value)_heads|num_key_value_heads", 2),
    (r"num_attention_heads|n_heads?|(en|de)coder_attention_heads|num_heads", 4),
    (r"hidden_size|n_embd|d_model|dim|emb_dim|embedding_size|word_embed_proj_dim", 64),
    (r"(moe_|shared_|expert_).*intermediate_size|.*(ffn_hidden_size|expert_ffn.*)", 48),
    (r".*intermediate_size|n_inner|(en|de)coder_ffn_dim|ffn_dim|dff|d_ff", 96),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_(tok|token)|num_selected_experts|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"n_group|topk_group", 1),
    (r"n(um)?_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"q_lora_rank", 32),
    (r"kv_lora_rank", 16),
    (r"qk_nope_head_dim|v_head_dim|(global_|swa_|attention_|index_)?head_dim|d_kv|kv_channels", 16),
    (r"qk_rope_head_dim", 16),  # which some take for head_dim
    (r"rotary_dim", 8),
    (r"attn_layer_period", 2),  # of two layers, the second attends
    (r"attn_layer_offset", 1),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"(mamba_)?n_groups", 1),
    (r"mamba_d_ssm", 128),
)


# Sizes that some configurations leave open and their models need.
NONE = {"head_dim": 1, "n_routed_experts": 1, "n_shared_experts": 1, "num_experts_per_tok": 1, "num_experts": 1}


def tiny_config(kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    """`kind` with small sizes: of its layers the first of each sort, two at least."""
    default = kind()
    values = {name: NONE.get(name) if v is None else v for name, v in default.to_dict().items()}
    values = {name: value for name, value in values.items() if value is not None}
    sizes = {name: small(name, value) for name, value in values.items()}
    changed = {name: size for name, size in sizes.items() if size is not None}
    try:
        layers = default.num_hidden_layers
    except (AttributeError, NotImplementedError):
        layers = None
    lists = {n: v for n, v in values.items() if isinstance(v, list) and len(v) == layers and len(v) > 2}
    if lists:
        sorts = list(zip(*(map(str, v) for v in lists.values()), strict=True))
        kept = sorted({sorts.index(sort) for sort in sorts} | {0, 1})[:6]
        changed |= {name: [value[i] for i in kept] for name, value in lists.items()}
        names = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"} & set(values)
        changed |= dict.fromkeys(names, len(kept))
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in changed:
        changed["num_key_value_heads"] = changed["num_attention_heads"]
    if "expand" in values and "head_dim" in changed:  # the heads of a state are as wide as all channels
        changed["head_dim"] = values["expand"] * changed["hidden_size"] // changed["num_heads"]
    if "num_attention_heads" in values and set(changed.get("layer_types", [])) == {"linear_attention"}:
        changed["layer_types"] = ["linear_attention", "full_attention"]
    if hasattr(default, "attn_layer_indices"):
        changed["attn_layer_indices"] = [1]
    for name, sub in kind.sub_configs.items():
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig) and issubclass(sub, PretrainedConfig):
            changed[name] = tiny_config(type(part)).to_dict()
    return kind(**changed | more)


def small(name: str, value: Any) -> Any:
    """The tiny size for the field `name`, or None to leave it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def outcome(name: str) -> dict[str, Any]:
    """Try the architecture `name`: what it is, whether it works, and why not."""
    found: dict[str, Any] = {"architecture": name, "class": MAPPING[name], "kind": "decoder-only", "note": ""}
    torch.manual_seed(0)
    try:
        config = tiny_config(CONFIG_MAPPING[name])
        found["kind"] = kind_of_config(config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = 2
        found["kind"] = kind_of(model, config)
        ids = torch.randint(4, 99, (2, 12))
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    except Exception as error:
        return found | {"cause": NOT_RUN, "note": first_line(error)}
    try:
        exported = exgen.export_for_generation(model)
        mask[1, :3] = 0
        ids[1, :3] = 0
        notes = {compare(model, exported, ids, mask, num_beams) for num_beams in (1, 4)}
        return found | {"cause": WORKS, "note": "; ".join(sorted(notes - {""}))}
    except Exception as error:
        return found | {"cause": cause_of(error, model), "note": first_line(error)}


def kind_of_config(config: PretrainedConfig) -> str:
    if config.is_encoder_decoder or hasattr(config, "encoder_layers") or hasattr(config, "decoder_layers"):
        return "encoder-decoder"
    return "decoder-only" if config.get_text_config() is config else "multimodal"


@torch.no_grad()
def kind_of(model: PreTrainedModel, config: PretrainedConfig) -> str:
    """By structure: an encoder's first logits depend on tokens that come later."""
    if kind_of_config(config) == "encoder-decoder":
        return "encoder-decoder"
    parts = [part for part in vars(model.config).values() if isinstance(part, PretrainedConfig)]
    if model.main_input_name != "input_ids" or model.config.get_text_config() is not model.config or parts:
        return "multimodal"
    ids = torch.arange(4, 16)[None]
    changed = ids.clone()
    changed[0, -1] = 50
    first, other = (model(input_ids=x).logits[0, 0] for x in (ids, changed))
    return "decoder-only" if torch.allclose(first, other, atol=1e-4) else "encoder"


def compare(model: PreTrainedModel, exported: Any, ids: Tensor, mask: Tensor, num_beams: int) -> str:
    """Raise unless exgen's ids are eager's. A note where eager itself changes its mind when a prompt is padded."""
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": num_beams, "do_sample": False, "pad_token_id": 0}
    mine = exgen.generate(exported, ids, mask, **options)
    wanted = model.generate(ids, attention_mask=mask, **options)
    if mine.equal(wanted):
        return ""
    for i in range(len(ids)):
        n = int(mask[i].sum())
        alone = model.generate(ids[i : i + 1, -n:], attention_mask=mask[i : i + 1, -n:], **options)[0, n:]
        length = min(len(alone), mine.shape[1] - ids.shape[1])
        if not mine[i, ids.shape[1] :][:length].equal(alone[:length]):
            raise ValueError(f"other ids than eager's with {num_beams} beams, also without padding")
    return "as eager without padding, which changes eager's own ids"


@torch.no_grad()
def cause_of(error: Exception, model: PreTrainedModel) -> str:
    text = str(error)
    if "other states" in text:
        return STATES
    if "torch.export cannot trace" in text:
        return UNTRACEABLE
    return OTHER_LOGITS if "cannot be made a step program" in text else OTHER


def first_line(error: Exception) -> str:
    lines = (str(error).strip() or repr(error)).splitlines()
    return f"{type(error).__name__}: " + " ".join(lines[: 3 if lines[0].endswith(":") else 1])[:600]


def attempt(name: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    append(outcome(name))
    os._exit(0)  # what a forked process would clean up is its parent's


def append(found: dict[str, Any]) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps(found) + "\n")
        file.flush()


def supervised(name: str, deadline: float) -> None:
    """`attempt` in a process of its own, so that one that hangs or crashes does not stop the others."""
    if time.monotonic() > deadline:
        return
    process = multiprocessing.get_context("fork").Process(target=attempt, args=(name,))
    process.start()
    process.join(SECONDS)
    if process.exitcode != 0:
        process.kill()
        cause, note = (SLOW, "") if process.exitcode is None else (OTHER, f"exit code {process.exitcode}")
        kind = kind_of_config(CONFIG_MAPPING[name]())
        append({"architecture": name, "class": MAPPING[name], "kind": kind, "cause": cause, "note": note})


def read_outcomes() -> dict[str, dict[str, Any]]:
    lines = OUTCOMES.read_text().splitlines() if OUTCOMES.exists() else []
    return {found["architecture"]: found for found in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--again", nargs="*", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = read_outcomes()
    done = {n for n, found in before.items() if not {n, found["cause"]} & set(arguments.again)}
    deadline = time.monotonic() + arguments.minutes * 60
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: supervised(name, deadline), [n for n in MAPPING if n not in done]))
    outcomes = read_outcomes()
    (HERE.parent / "docs" / "coverage.md").write_text(document(outcomes))
    for key, n in Counter((f["kind"], f["cause"]) for f in outcomes.values()).most_common():
        print(n, *key)


def document(outcomes: dict[str, dict[str, Any]]) -> str:
    """docs/coverage.md: what works, and for the rest what stands in the way."""
    tried = [found for _, found in sorted(outcomes.items()) if found["kind"] == "decoder-only"]
    ours = [found for found in tried if found["cause"] != NOT_RUN]
    works = sum(found["cause"] == WORKS for found in ours)
    others = Counter(f["kind"] for f in outcomes.values() if f["kind"] != "decoder-only")
    kinds = ", ".join(f"{n} {kind}" for kind, n in others.most_common())
    rows = "\n".join(f"| {f['architecture']} | {f['cause']} | {shown(f)} |" for f in tried)
    return f"""# Coverage

Written by `bench/coverage.py`, with transformers {transformers.__version__}: a tiny random model of every architecture
in its causal-LM mapping, exported, and generated from greedily and with 4 beams, two prompts, one left-padded.

**{works} of {len(ours)}** decoder-only architectures that transformers' own `generate` runs at this size give eager's
ids ({works / max(len(ours), 1):.0%}). Not of that kind, though in the mapping: {kinds}.

| architecture | outcome | |
| --- | --- | --- |
{rows}
"""


def shown(found: dict[str, Any]) -> str:
    """What there is to say of an outcome, short enough for a table."""
    note = found["note"].replace("|", "/").replace("\n", " ")
    return note if len(note) < 240 else note[:240] + " ..."


if __name__ == "__main__":
    main()
