"""Artifacts as other recipes make them, and what `generate` answers to them in a process of its own.

torch.export.save(make(tiny(model)), folder / f"{kind}.pt2")               # kind: (model, make) of KINDS
python artifacts.py folder               # writes answers.json: {kind: {case: tokens}}, as each of two threads got them
"""

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tiny import CONFIGS, tiny
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import GenerationConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from exgen import export_for_generation, generate

NEW = int(version("transformers").split(".")[0]) >= 5
SLOTS, LONGEST = 24, 64  # of every cache; of texts where there is none
LENGTHS = (8, 4, 1)  # of the prompts, left-padded

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"rows": [0]},
    "4 beams": {"rows": [0], "num_beams": 4, "num_return_sequences": 3},
    "sampling": {"rows": [0], "do_sample": True, "num_return_sequences": 3},
    "ragged": {"rows": [0, 1, 2]},
    "ragged beams": {"rows": [0, 1, 2], "num_beams": 3, "num_return_sequences": 2},
    "shorter": {"rows": [1]},
}


def prompts(rows: list[int]) -> tuple[Tensor, Tensor]:
    """`[b, t]` tokens and their mask."""
    ids = torch.randint(90, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    longest = max(LENGTHS[row] for row in rows)
    return ids.where(mask, 97)[rows, -longest:], mask.long()[rows, -longest:]


def answers(call: Callable[..., Tensor], cases: Iterable[str] = CASES) -> dict[str, list[list[int]]]:
    """What `call(ids, attention_mask=..., seed=..., **cfg)` answers to each case."""
    texts = {}
    for case in cases:
        cfg = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 98, "pad_token_id": 97} | CASES[case]
        ids, mask = prompts(cfg.pop("rows"))
        texts[case] = call(ids, attention_mask=mask, seed=0, **cfg).tolist()
    return texts


def ours(exported: Any) -> Callable[..., Tensor]:
    def call(*inputs: Tensor, seed: int, **cfg: Any) -> Tensor:
        generator = torch.Generator().manual_seed(seed) if cfg["do_sample"] else None
        return generate(exported, *inputs, **cfg, generator=generator)

    return call


def theirs(model: PreTrainedModel) -> Callable[..., Tensor]:
    def call(*inputs: Tensor, seed: int, **cfg: Any) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(*inputs, **cfg)

    return call


def shallow(name: str) -> PreTrainedModel:
    """A tiny model of one layer, for what takes a compiler long."""
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = 1
    with patch.dict(CONFIGS, {name: config}):
        return tiny(name)


# --- recipes of transformers ---


def _with_static_cache(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.cache_implementation = "static"
    model.generation_config.cache_config = {"batch_size": 1, "max_cache_len": SLOTS}
    model.generation_config.use_cache = True
    return model


def _example(s: int) -> tuple[Tensor, Tensor, dict[str, Any] | None]:
    """Tokens, positions and sizes to export with: one token, or any number up to `SLOTS - 1`."""
    dim = Dim("s", max=SLOTS - 1)
    dims = {"input_ids": {1: dim}, "cache_position": {0: dim}} if s > 1 else None
    return torch.zeros(1, s, dtype=torch.long), torch.arange(s), dims


def decoder_only(model: PreTrainedModel, s: int, strict: bool) -> ExportedProgram:
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    ids, positions, sizes = _example(s)
    recipe = TorchExportableModuleForDecoderOnlyLM(_with_static_cache(model), batch_size=1, max_cache_len=SLOTS)
    return recipe.export(input_ids=ids, cache_position=positions, dynamic_shapes=sizes, strict=strict)


def with_cache(model: PreTrainedModel, s: int, strict: bool) -> ExportedProgram:
    from transformers.integrations.executorch import convert_and_export_with_cache

    return convert_and_export_with_cache(_with_static_cache(model), *_example(s), strict=strict)


def exported_model(model: PreTrainedModel, static: bool, multi: bool) -> Any:
    """An `ExportedModel` of transformers' own exporter, new in its version 5."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    ids = torch.randint(90, (2, 5))
    settings = GenerationConfig(cache_implementation="static") if static else None
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DynamoExporter().export_for_generation(
        model, inputs, DynamoConfig(dynamic=True), generation_config=settings, multi_token_decode=multi
    )


def exporter(model: PreTrainedModel, static: bool, multi: bool) -> ExportedProgram:
    return exported_model(model, static, multi).components["decode"].program


def dynamic_cache(model: PreTrainedModel) -> ExportedProgram:
    from transformers.integrations.executorch import export_with_dynamic_cache

    ids = torch.zeros(1, SLOTS, dtype=torch.long)
    return export_with_dynamic_cache(model, ids, torch.ones_like(ids))


# --- a module shaped as gpt-fast's, with llama's weights ---


class InputPositions(nn.Module):
    """`forward(idx, input_pos)` with caches in buffers, one row."""

    causal: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        h, d = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
        for i in range(len(model.model.layers)):
            for name in "kv":
                self.register_buffer(f"{name}{i}", torch.zeros(1, h, SLOTS, d))
        self.register_buffer("causal", torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril())

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        return self.read(idx, input_pos, [self.causal[None, None, input_pos]])

    def read(self, idx: Tensor, input_pos: Tensor, masks: list[Tensor]) -> Tensor:
        x = self.model.model.embed_tokens(idx)
        cos, sin = self.model.model.rotary_emb(x, input_pos[None])
        for i, layer in enumerate(self.model.model.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(y).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
            keys, values = getattr(self, f"k{i}"), getattr(self, f"v{i}")
            slots = input_pos if keys.shape[2] == SLOTS else input_pos % keys.shape[2]
            keys[:, :, slots] = k
            values[:, :, slots] = v
            mask = masks[i % len(masks)]
            y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))


class MaskGiven(InputPositions):
    def forward(self, mask: Tensor, idx: Tensor, input_pos: Tensor) -> Tensor:  # type: ignore[override]
        return self.read(idx, input_pos, [mask])


class Windows(InputPositions):
    """Every layer sees a window; the last keeps no more than that, in a ring. One token a call."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.last, self.window = len(model.model.layers) - 1, model.config.sliding_window
        for name in "kv":
            whole = getattr(self, f"{name}{self.last}")
            self.register_buffer(f"{name}{self.last}", whole[:, :, : self.window].clone())

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        masks = []
        for l in [SLOTS] * self.last + [self.window]:
            ages = (input_pos - torch.arange(l)) % l  # of the tokens in the slots, by positions
            masks.append(((ages <= input_pos) & (ages < self.window))[None, None, None])
        return self.read(idx, input_pos, masks)


class Counting(InputPositions):
    """Counts the tokens it was fed by itself."""

    count: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        positions = self.count + torch.arange(idx.shape[1])
        logits = self.read(idx, positions, [self.causal[None, None, positions]])
        self.count.add_(idx.shape[1])
        return logits


class StartGiven(InputPositions):
    """Only the first token's position is given."""

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        positions = cache_position + torch.arange(input_ids.shape[1])
        return self.read(input_ids, positions, [self.causal[None, None, positions]])


def input_pos(model: PreTrainedModel, s: int = 3, kind: type[InputPositions] = InputPositions) -> ExportedProgram:
    ids, positions, _ = _example(s)
    dim = Dim("s", max=SLOTS)
    dims = ({1: dim}, {0: dim}) if s > 1 else None
    return torch.export.export(kind(model), (ids, positions), dynamic_shapes=dims)


def mask_and_input_pos(model: PreTrainedModel, dtype: torch.dtype) -> ExportedProgram:
    ids, positions, _ = _example(3)
    dim = Dim("s", max=SLOTS)
    mask = torch.ones(1, 1, 3, SLOTS, dtype=dtype)
    return torch.export.export(MaskGiven(model), (mask, ids, positions), dynamic_shapes=({2: dim}, {1: dim}, {0: dim}))


def counting(model: PreTrainedModel) -> ExportedProgram:
    return torch.export.export(Counting(model), (torch.zeros(1, 1, dtype=torch.long),))


def start(model: PreTrainedModel) -> ExportedProgram:
    dim = Dim("s", max=SLOTS - 1)
    inputs = (torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    return torch.export.export(StartGiven(model), inputs, dynamic_shapes=({1: dim}, None))


# --- no cache ---


def without_vmap(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with a mask that can be saved: 4.57 makes its own by `vmap`, and its recipes leave that out likewise."""
    from transformers.integrations.executorch import sdpa_mask_without_vmap

    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa_without_vmap", sdpa_mask_without_vmap)
    ALL_ATTENTION_FUNCTIONS.register("sdpa_without_vmap", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = "sdpa_without_vmap"
    return model


class Logits(nn.Module):
    def __init__(self, model: PreTrainedModel, last: bool = False) -> None:
        super().__init__()
        self.model, self.last = model if NEW else without_vmap(model), last

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits[:, -1] if self.last else logits


def no_cache(
    model: PreTrainedModel, shape: tuple[int, int], dynamic: str = "", mask: bool = False, last: bool = False
) -> ExportedProgram:
    ids = torch.zeros(shape, dtype=torch.long)
    inputs = (ids, torch.ones_like(ids)) if mask else (ids,)
    dims = {axis: Dim(name, min=2, max=LONGEST) for axis, name in enumerate("bs") if name in dynamic}
    return torch.export.export(Logits(model, last), inputs, dynamic_shapes=(dims,) * len(inputs), strict=False)


KINDS: dict[str, tuple[str, Callable[..., ExportedProgram]]] = {
    "decoder only, one token, strict": ("llama", partial(decoder_only, s=1, strict=True)),
    "decoder only, many tokens": ("llama", partial(decoder_only, s=3, strict=False)),
    "with cache, one token": ("qwen2", partial(with_cache, s=1, strict=False)),
    "with cache, many tokens, strict": ("gpt2", partial(with_cache, s=3, strict=True)),
    "input_pos": ("llama", input_pos),
    "input_pos, one token": ("llama", partial(input_pos, s=1)),
    "input_pos, hybrid cache": ("mistral", partial(input_pos, s=1, kind=Windows)),
    "bool mask and input_pos": ("llama", partial(mask_and_input_pos, dtype=torch.bool)),
    "additive mask and input_pos": ("llama", partial(mask_and_input_pos, dtype=torch.float32)),
    "positions counted inside": ("llama", counting),
    "first position alone": ("llama", start),
    "dynamic cache": ("llama", dynamic_cache),
    "step program": ("llama", export_for_generation),
    "no cache": ("llama", partial(no_cache, shape=(2, 3), dynamic="bs")),
    "no cache, attention_mask": ("gpt2", partial(no_cache, shape=(2, 3), dynamic="bs", mask=True)),
    "no cache, one row of a fixed length": ("opt", partial(no_cache, shape=(1, SLOTS))),
    "no cache, four rows, attention_mask": ("opt", partial(no_cache, shape=(4, 3), dynamic="s", mask=True)),
    "no cache, last logits alone": ("llama", partial(no_cache, shape=(2, 3), dynamic="bs", last=True)),
}
if NEW:  # 4.57 has no exporters, and its hybrid cache holds no text longer than the window
    KINDS |= {
        "decoder only, hybrid cache, one token": ("gemma3", partial(decoder_only, s=1, strict=False)),
        "exporter, dynamic cache, many tokens": ("llama", partial(exporter, static=False, multi=True)),
        "exporter, dynamic cache, one token": ("qwen2", partial(exporter, static=False, multi=False)),
        "exporter, static cache, many tokens": ("llama", partial(exporter, static=True, multi=True)),
        "exporter, static cache, one token": ("llama", partial(exporter, static=True, multi=False)),
    }

PACKAGES: dict[str, tuple[str, Callable[..., ExportedProgram]]] = {  # of one layer
    "package, step program": ("llama", export_for_generation),
    "package, decoder only, many tokens": ("llama", partial(decoder_only, s=3, strict=True)),
    "package, input_pos, one token": ("llama", partial(input_pos, s=1)),
    "package, no cache": ("llama", partial(no_cache, shape=(2, 3), dynamic="bs")),
}


def compiled(exported: ExportedProgram, file: Path) -> Path:
    """An AOTInductor package of `exported`, with a step program's metadata."""
    custom = exported.graph_module.meta.get("custom", {})
    configs: dict[str, Any] = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # compiles faster
    if "exgen" in custom:
        configs["aot_inductor.metadata"] = {"exgen": custom["exgen"]}
    torch._inductor.aoti_compile_and_package(exported, package_path=str(file), inductor_configs=configs)
    return file


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        for file in folder.glob("*.pt2"):
            try:
                both = list(pool.map(partial(answers, ours(file)), (CASES, reversed(CASES))))
                found[file.stem] = {case: [one[case] for one in both] for case in CASES}
            except Exception:  # the tests of this kind show it, and fail
                found[file.stem] = dict.fromkeys(CASES, traceback.format_exc())
    (folder / "answers.json").write_text(json.dumps(found))
