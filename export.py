"""export.py: make a *step program* of a decoder-only transformers model, a pure function that gets its cache as arguments.

    program = export_for_generation(model)              # a torch.export.ExportedProgram
    torch.export.save(program, "model.pt2")             # loads and runs without the model's code
    logits = program.module()(input_ids, position_ids, slots, visible, logits_at, slot_positions, keys, values)

Axes: `b` rows, `s` tokens fed, `l` cache slots, `h` key/value heads, `d` head size, `n` logits asked for, `v` vocabulary.

| argument         | shape, dtype              | meaning                                                        |
| ---------------- | ------------------------- | -------------------------------------------------------------- |
| `input_ids`      | `[b, s]` int64            | tokens to feed                                                 |
| `position_ids`   | `[b, s]` int64            | each token's position in its own sequence                      |
| `slots`          | `[b, s]` int64            | the cache slot each token writes its key and value to          |
| `visible`        | `[b, s, l]` bool          | the slots each token may attend to, its own included           |
| `logits_at`      | `[n]` int64               | which of the `s` tokens to compute logits for                  |
| `slot_positions` | `[b, l]` int64, mutated   | position of the token held in each slot                        |
| `keys`, `values` | `[b, h, l, d]`s, mutated  | the cache, two lists with one tensor per layer                 |
| returns          | `[b, n, v]`               | logits                                                         |

`b`, `s`, `l` and `n` are all dynamic. `visible` alone says what is causal and what is padding. The graph narrows it by the
model's own windows and chunks, computed from positions, so that slots can be used in any order.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

SLOTS = "exgen_slots"  # our attention and masks are registered under this name, only while a model runs
# How a model can be made to attend through slots, best first: its attention implementation, the mask it is given.
WAYS = ((SLOTS, "none"), (SLOTS, "counted"), ("sdpa", "whole"), ("eager", "whole"))
# Largest relative difference from the model's own logits: float32 measures 1e-6; 16-bit models round differently.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}


class CacheShape(NamedTuple):
    keys: list[tuple[int, int]]  # (h, d) of each layer
    values: list[tuple[int, int]]
    dtype: torch.dtype
    device: torch.device


def export_for_generation(model: PreTrainedModel) -> ExportedProgram:
    """`model` as a step program, its metadata in `graph_module.meta["custom"]["exgen"]`; `model` is left as it was.

    The program shares the model's weights. Its logits are compared with the model's own eager ones before it is returned."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise TypeError(f"export_for_generation got {type(model).__name__}: give it a decoder-only transformers model")
    config = model.config.get_text_config()
    max_positions = getattr(config, "max_position_embeddings", None)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (2, min(40, max_positions or 40)), generator=generator).to(model.device)
    with torch.no_grad(), prepared(model, "eager"):
        logits, shape = run_eager(model, prompts)
    failures = []
    for attention, mask in WAYS:
        step = Step(model, attention, mask)
        try:
            with torch.no_grad(), prepared(model, attention):
                require_agreement(step, prompts, logits, shape)
                windows = dict(step.windows)
                program = simplified(traced(step, shape))
                require_agreement(program.module(check_guards=False), prompts, logits, shape)
        except Exception as error:  # a model's code can fail in any way when its attention is replaced
            failures.append(f"{attention} attention, {mask} mask: {str(error).strip().splitlines()[0]}")
            cause = error
            continue
        metadata = {
            "format": 1,
            "keys": shape.keys,
            "values": shape.values,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "vocab_size": logits.shape[-1],
            "max_positions": max_positions,
            "windows": [windows.get(layer) for layer in range(len(shape.keys))],
            "generation_config": model.generation_config.to_diff_dict() if model.generation_config else {},
            "model_type": model.config.model_type,
        }
        program.graph_module.meta.setdefault("custom", {})["exgen"] = json.dumps(metadata)
        return program
    raise ValueError(f"{type(model).__name__} could not be exported as a step program:\n" + "\n".join(failures)) from cause


class Step(nn.Module):
    """The contract's `forward`, around a model."""

    def __init__(self, model: PreTrainedModel, attention: str, mask: str) -> None:
        super().__init__()
        self.model, self.attention, self.mask = model, attention, mask
        self.accepts = set(inspect.signature(model.forward).parameters)
        self.windows: dict[int, int | None] = {}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        cache = SlotCache(position_ids, slots, visible, slot_positions, keys, values, self.model)
        slot_positions[cache.rows, slots] = position_ids
        # transformers 5 renamed `past_key_values` to `cache`.
        arguments: dict[str, Any] = {"cache" if "cache" in self.accepts else "past_key_values": cache}
        arguments |= {"position_ids": position_ids, "logits_to_keep": logits_at}
        counted = torch.ones_like(slot_positions)
        if self.mask != "none":
            arguments["attention_mask"] = counted if self.mask == "counted" else cache.plain_mask()
        arguments = {name: value for name, value in arguments.items() if name in self.accepts}
        with registered(cache), PositionsByCounting(counted, slot_positions):
            logits = self.model(input_ids=input_ids, use_cache=True, return_dict=True, **arguments).logits
        self.windows = cache.windows
        return logits if "logits_to_keep" in self.accepts else logits[:, logits_at]


class SlotCache(Cache):
    """One step's cache. The model's keys and values are written at `slots`, and it is answered with those of all slots;
    masks and attention then work on slots too."""

    def __init__(
        self,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        slot_positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        model: PreTrainedModel,
    ) -> None:
        self.position_ids, self.slots, self.visible, self.slot_positions = position_ids, slots, visible, slot_positions
        self.keys, self.values, self.model = keys, values, model
        self.layers: list[Any] = []  # what transformers' own methods look at
        self.layer = 0  # the layer at work
        self.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]  # [b, 1]
        self.windows: dict[int, int | None] = {}  # by layer
        self.masks: dict[int, tuple[Tensor, int | None]] = {}  # by id of the mask: itself and its window
        self.folded: dict[tuple[int, int], Tensor] = {}  # by id of the mask and groups

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        # index_put_: compiled, scatter_ would clone the cache at every step.
        keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        # Nothing is asked of the whole cache's length, since positions are given. Attention that scales queries by how
        # far they are (llama4, past 8,192 tokens) adds a layer's length to 0..s: answered for the first row.
        if layer_idx is None:
            return 0
        return self.position_ids[0] - torch.arange(self.position_ids.shape[1], device=self.position_ids.device)

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.visible.shape[2], 0

    def mask(self, *_: Any, mask_function: Callable, dtype: torch.dtype, local_size: int | None = None, **__: Any) -> Tensor:
        """What transformers asks for once per kind of layer: here `[b, 1, s, l]`, to be added to the scores."""
        allowed = self.visible[:, None]
        if mask_function is not causal_mask_function:
            rows = self.rows[:, :, None, None]
            queries, slots = self.position_ids[:, None, :, None], self.slot_positions[:, None, None, :]
            allowed = allowed & mask_function(rows, torch.zeros_like(rows), queries, slots)
        # The least number, not -inf: a row of padding that sees nothing must not become NaN.
        mask = torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)
        self.masks[id(mask)] = mask, local_size
        return mask

    def plain_mask(self, *_: Any, **__: Any) -> Tensor:
        """For models that do not say what they mask: `visible`, provided that they have no window."""
        config = self.model.config.get_text_config()
        for name in ("sliding_window", "window_size", "attention_window", "attention_chunk_size"):
            if getattr(config, name, None):
                raise ValueError(f"{name} is {getattr(config, name)}, but the model's mask cannot be asked for")
        return self.mask(mask_function=causal_mask_function, dtype=self.model.dtype)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query `[b, h * g, s, d]`, answer `[b, s, h * g, d]`.

        The groups are folded into the queries, for neither keys nor values are then copied `g` times."""
        g = query.shape[1] // key.shape[1]
        mask = self.plain_mask() if attention_mask is None else attention_mask
        mask = mask if position_bias is None else mask + position_bias
        self.windows[self.layer] = self.masks[id(mask)][1] if id(mask) in self.masks else None
        if (id(mask), g) not in self.folded:
            self.masks.setdefault(id(mask), (mask, None))  # alive, so that its id stays its own
            grouped = "b (h g) s l -> b h (g s) l" if mask.shape[1] > 1 else "b h s l -> b h (g s) l"
            self.folded[id(mask), g] = (rearrange if mask.shape[1] > 1 else repeat)(mask, grouped, g=g)
        mask = self.folded[id(mask), g]
        query = rearrange(query, "b (h g) s d -> b h (g s) d", g=g)
        if softcap is None and s_aux is None:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        else:
            scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap) + mask
            if s_aux is not None:  # a learned score per head that takes its share of the weights and gives nothing
                sinks = repeat(s_aux, "(h g) -> b h (g s) 1", g=g, b=query.shape[0], s=query.shape[2] // g)
                scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
            weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
            attended = weights[..., : key.shape[2]] @ value
        return rearrange(attended, "b h (g s) d -> b s (h g) d", g=g), None


class PositionsByCounting(TorchFunctionMode):
    """Models with ALiBi find positions by counting the padding mask, `mask.cumsum(-1) - 1`. Slots may be in any order, so
    the mask's count is answered with the true positions."""

    def __init__(self, mask: Tensor, slot_positions: Tensor) -> None:
        super().__init__()
        self.mask, self.slot_positions = mask, slot_positions

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (Tensor.cumsum, torch.cumsum) and args[0] is self.mask:
            return self.slot_positions + 1
        answer = func(*args, **(kwargs or {}))
        if func is Tensor.to and args[0] is self.mask and answer.dtype == self.mask.dtype:
            self.mask = answer
        return answer


@contextmanager
def registered(cache: SlotCache) -> Iterator[None]:
    """Let transformers find `cache`'s masks and attention under the name SLOTS."""
    # Before create_causal_mask, models built their mask in a method of this name; some in 4.57 still do.
    old_style = [module for module in cache.model.modules() if hasattr(type(module), "_update_causal_mask")]
    AttentionInterface.register(SLOTS, cache.attend)
    AttentionMaskInterface.register(SLOTS, cache.mask)
    for module in old_style:
        module.__dict__["_update_causal_mask"] = cache.plain_mask
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(SLOTS)
        AttentionMaskInterface._global_mapping.pop(SLOTS)
        for module in old_style:
            module.__dict__.pop("_update_causal_mask")


@contextmanager
def prepared(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """`model` in eval mode with this attention implementation, and as it was afterwards."""
    named = [module.config for module in model.modules() if isinstance(getattr(module, "config", None), PretrainedConfig)]
    named += [part for config in named for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    configs = {id(config): config for config in named}.values()
    before = [dict(vars(config)) for config in configs]
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for config in configs:
            config._attn_implementation_internal = attention
            if getattr(config, "_experts_implementation_internal", None) == "eager":
                config._experts_implementation_internal = "grouped_mm"  # eager loops over the experts in use
        yield
    finally:
        for config, attributes in zip(configs, before, strict=True):
            vars(config).clear()
            vars(config).update(attributes)
        for module, mode in training:
            module.training = mode


def run_eager(model: PreTrainedModel, prompts: Tensor) -> tuple[Tensor, CacheShape]:
    """The model's own logits `[b, t, v]`, and the shape of the cache it filled."""
    output = model(input_ids=prompts, use_cache=True, return_dict=True)
    cache = output.cache if "cache" in output else output.past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers
    if not all(isinstance(getattr(layer, "keys", None), Tensor) for layer in layers):
        raise ValueError(f"{type(model).__name__} keeps states other than keys and values ({cache}), not supported")
    keys, values = ([(x.shape[1], x.shape[3]) for x in xs] for xs in zip(*((layer.keys, layer.values) for layer in layers)))
    return output.logits, CacheShape(keys, values, layers[0].keys.dtype, prompts.device)


def empty_cache(shape: CacheShape, b: int, l: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """slot_positions, keys, values."""

    def zeros(heads: list[tuple[int, int]]) -> list[Tensor]:
        return [torch.zeros(b, h, l, d, dtype=shape.dtype, device=shape.device) for h, d in heads]

    return torch.zeros(b, l, dtype=torch.long, device=shape.device), zeros(shape.keys), zeros(shape.values)


def traced(step: Step, shape: CacheShape) -> ExportedProgram:
    # Sizes of 0 and 1 would be built into the graph, and so would two equal ones.
    slot_positions, keys, values = empty_cache(shape, 3, 11)
    ids = [torch.zeros(3, 5, dtype=torch.long, device=shape.device) for _ in range(3)]
    visible = torch.ones(3, 5, 11, dtype=torch.bool, device=shape.device)
    logits_at = torch.zeros(2, dtype=torch.long, device=shape.device)
    b, s, l, n = (Dim(name, min=1) for name in "bsln")
    tokens, layers = {0: b, 1: s}, [{0: b, 2: l}] * len(keys)
    sizes = (tokens, tokens, tokens, {0: b, 1: s, 2: l}, {0: n}, {0: b, 1: l}, layers, layers)
    inputs = (*ids, visible, logits_at, slot_positions, keys, values)
    return torch.export.export(step, inputs, dynamic_shapes=sizes, strict=False)


def simplified(program: ExportedProgram) -> ExportedProgram:
    """Drop what costs time and does nothing: checks of dtypes, conversions to the same dtype, whole slices, dropout in
    eval mode, contexts of autocast off and gradients off; and make weights that no longer ask for gradients."""
    aten = torch.ops.aten
    graph = program.graph
    identities = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.slice.Tensor, aten.dropout.default, aten.expand.default)
    for node in graph.nodes:
        if "wrap_with" in str(node.target):
            inline(program, node)
    for node in graph.nodes:
        if node.target == aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in identities and looks_like(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    program.graph_module.recompile()
    for name, weight in program.state_dict.items():
        if isinstance(weight, nn.Parameter):
            program.state_dict[name] = nn.Parameter(weight.detach(), requires_grad=False)
    return program


def inline(program: ExportedProgram, node: Node) -> None:
    """Put the body of a `with` block, kept by torch.export as a submodule, in its place."""
    at = next(i for i, argument in enumerate(node.args) if isinstance(argument, Node) and argument.op == "get_attr")
    holder = node.args[at]
    body = program.graph_module.get_submodule(holder.target).graph
    inputs = [inner for inner in body.nodes if inner.op == "placeholder"]
    with program.graph.inserting_before(node):
        outputs = program.graph.graph_copy(body, dict(zip(inputs, node.args[at + 1 :], strict=True)))
    for user in list(node.users):  # each takes one of the outputs
        user.replace_all_uses_with(outputs[user.args[1]])
        program.graph.erase_node(user)
    program.graph.erase_node(node)
    if not holder.users:
        program.graph.erase_node(holder)
        program.graph_module.delete_submodule(holder.target)


def looks_like(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and x.device == y.device and list(map(str, x.shape)) == list(map(str, y.shape))


def require_agreement(step: Callable[..., Tensor], prompts: Tensor, logits: Tensor, shape: CacheShape) -> None:
    """Feed `prompts` [b, t] in two parts, the second row shifted by padding, at slots in random order, and compare."""
    b, t = prompts.shape
    columns = torch.arange(t)
    starts = 2 * torch.arange(b)[:, None] if t > 4 else torch.zeros(b, 1, dtype=torch.long)  # [b, 1]
    position_ids = (columns - starts).clamp(min=0)  # [b, t]
    l = t + 7
    slots = torch.stack([torch.randperm(l, generator=torch.Generator().manual_seed(row))[:t] for row in range(b)])
    sees = ((columns <= columns[:, None]) & (columns >= starts[:, None])) | torch.eye(t, dtype=torch.bool)  # [b, t, t]
    visible = torch.zeros(b, t, l, dtype=torch.bool).scatter_(2, slots[:, None].expand(b, t, t), sees)
    cache = empty_cache(shape, b, l)
    inputs = [prompts.gather(1, position_ids.to(shape.device)), *(x.to(shape.device) for x in (position_ids, slots, visible))]
    parts = []
    for part in (slice(0, t // 2), slice(t // 2, t)):
        at = torch.arange(t, device=shape.device)[part]
        parts.append(step(*(x[:, part] for x in inputs), at - at[0], *cache))
    real = (columns >= starts).to(shape.device)
    answer = torch.cat(parts, dim=1)[real].double()
    wanted = logits.gather(1, repeat(inputs[1], "b t -> b t v", v=logits.shape[-1]))[real].double()
    difference = (answer - wanted).norm() / wanted.norm()
    if not difference <= TOLERANCE[shape.dtype]:
        largest = (answer - wanted).abs().max()
        raise ValueError(f"logits differ from the model's own by {largest:.3g}, relatively {difference:.2g}")
