"""One calling convention over every kind of exported artifact.

`load(exported)` opens an artifact once and returns a `Program`: a pure function from tokens and state to logits and
state, and what the loop must know about it. No other file knows what kind of artifact runs.

    program = load("model.pt2")
    tensors = program.empty(1, 16)                               # the cache of one row, 16 slots, nothing read yet
    logits, tensors = program.step(input_ids, position_ids, slots, visible, logits_at, slot_positions, tensors)
"""

import io
import json
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import load_pt2

Step = Callable[..., tuple[Tensor, list[Tensor]]]
Adapt = Callable[[ExportedProgram], Any]  # a program of another recipe -> the first fields of `Program`, by name


class Program(NamedTuple):
    """An opened artifact.

    `step(input_ids [b, s], position_ids [b, s], slots [b, s], visible [b, s, l], logits_at [n], slot_positions [b, l],
    tensors)` feeds `s` tokens to each of `b` rows and returns `(logits [b, n, v], tensors)`. All indices are int64,
    `visible` is bool. Each token writes its key and value to its slot and attends to the slots it may see, its own
    included. `slot_positions` is updated in place; `tensors` is the state, rows first, mutated or replaced.
    """

    step: Step
    empty: Callable[[int, int], list[Tensor]]  # (b, l) -> the state of b rows with l slots that have read nothing
    slot_axes: tuple[
        int | None, ...
    ]  # each tensor's slot axis; None: a state without slots, copied and reordered whole
    free_slots: bool  # obeys `slots` and `visible`; else slots are positions 0, 1, 2, ... and rows are never padded
    max_slots: int | None  # None: as many as memory holds
    max_feed: int | None  # longest `s` of one call
    vocab_size: int | None
    max_positions: int | None  # longest text the model was built for
    generation_config: dict[str, Any]
    device: torch.device


def load(exported: "Program | ExportedProgram | str | Path", adapt: Adapt) -> Program:
    """Open an artifact: an `ExportedProgram`, or a path to one saved with `torch.export.save`.

    Opening takes seconds on a 30-layer model and happens once per artifact: the same object, or the same unchanged
    file, is never opened twice. Raises `FileNotFoundError` or `ValueError` for what is not a program, and `TypeError`
    for other objects.
    """
    if isinstance(exported, Program):
        return exported
    if isinstance(exported, ExportedProgram):
        if exported not in _opened:
            _opened[exported] = open_exported_program(exported, adapt)
        return _opened[exported]
    if isinstance(exported, str | Path):
        path = Path(exported)
        return _open_folder(path, adapt) if path.is_dir() else _open_file(path, adapt)
    if hasattr(exported, "components"):
        return _open_exported_model(exported, adapt)
    raise TypeError(
        f"exported is a {type(exported).__name__}; give a torch.export.ExportedProgram, the path of one saved with "
        "torch.export.save, or what exgen.load returned"
    )


_opened: "WeakKeyDictionary[ExportedProgram, Program]" = WeakKeyDictionary()
_opened_files: "OrderedDict[tuple[Path, int, int], Program]" = OrderedDict()
_FILES_KEPT = 2  # a program holds its model's weights


def _open_file(path: Path, adapt: Adapt) -> Program:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give the path of a program saved with torch.export.save")
    stat = path.stat()
    key = (path.resolve(), stat.st_mtime_ns, stat.st_size)
    if key not in _opened_files:
        _opened_files[key] = _opener(path, adapt)(path)
    _opened_files.move_to_end(key)
    while len(_opened_files) > _FILES_KEPT:
        _opened_files.popitem(last=False)
    return _opened_files[key]


def _opener(path: Path, adapt: Adapt) -> Callable[[Path], Program]:
    """The function that opens `path`, told by the archive's contents."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any("/data/aotinductor/" in name for name in names):
            return open_package
        if any(name.endswith("/archive_version") for name in names):
            _know_containers(path)
            return lambda path: open_exported_program(torch.export.load(path), adapt)
    raise ValueError(
        f"{path} is no exported program: supported are files written by torch.export.save, and packages of "
        "exgen.compile_for_generation"
    )


def _know_containers(path: Path) -> None:
    """Let torch read a program that was exported with containers of its own, as transformers' caches.

    Only the tensors in them matter here: they are inputs and outputs of the graph, one by one.
    """
    with zipfile.ZipFile(path) as archive:
        graphs = [archive.read(name).decode() for name in archive.namelist() if name.endswith("models/model.json")]
    names = {name for graph in graphs for name in re.findall(r'\\"type\\+": \\+"(\w+[.:][\w.:]+)', graph)}
    for name in names - pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.keys():
        pytree.register_pytree_node(
            type(name, (tuple,), {}), lambda held: (list(held), None), lambda held, _: held, serialized_type_name=name
        )


def _open_exported_model(model: Any, adapt: Adapt) -> Program:
    """Open transformers' `ExportedModel`: its `decode` reads prompts too, from an empty cache."""
    program = load(_decode({name: component.program for name, component in model.components.items()}), adapt)
    configs = [config.to_dict() for config in (model.config, model.generation_config) if config is not None]
    return program._replace(generation_config=_defaults(*configs))


def _open_folder(path: Path, adapt: Adapt) -> Program:
    """Open a folder that transformers' `ExportedModel.save_pretrained` wrote."""
    if not (path / "export.json").is_file():
        raise ValueError(f"{path} is a folder without an export.json: give what ExportedModel.save_pretrained wrote")
    components = json.loads((path / "export.json").read_text())["components"]
    program = _open_file(path / _decode({name: component["file"] for name, component in components.items()}), adapt)
    files = [path / name for name in ("config.json", "generation_config.json")]
    return program._replace(generation_config=_defaults(*(json.loads(f.read_text()) for f in files if f.is_file())))


def _decode(components: dict[str, Any]) -> Any:
    if "decode" not in components and len(components) != 1:
        raise ValueError(f"this export has the components {sorted(components)}: one named decode is needed")
    return components["decode"] if "decode" in components else next(iter(components.values()))


def _defaults(config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> dict[str, Any]:
    tokens = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    given = {name: value for name, value in (generation_config or {}).items() if "cache" not in name}
    return {name: value for name, value in {**tokens, **given}.items() if value is not None}


def open_exported_program(exported: ExportedProgram, adapt: Adapt) -> Program:
    """Open a step program, or one of another recipe through `adapt`. Raises `ValueError` for what is neither."""
    metadata = exported.graph_module.meta.get("custom", {}).get("exgen")
    if metadata is None:
        fields = adapt(exported)._asdict()
        return Program(**fields, free_slots=False, max_positions=None, generation_config={})
    module = exported.module(check_guards=False)
    device = _device(exported)
    if device.type == "cpu":
        _replace_linears(module)
    return step_program(module, json.loads(metadata), device)


FEW_TOKENS = 16  # what is quick for one token stays so for up to as many


def open_package(path: Path) -> Program:
    """Open an AOTInductor package of `compile_for_generation`: `decode` and `prefill` over one copy of the weights."""
    runners = load_pt2(str(path)).aoti_runners
    if runners.keys() != {"decode", "prefill"}:
        raise ValueError(
            f"{path} has the entry points {sorted(runners)}: make a package with exgen.compile_for_generation"
        )
    decode, prefill = runners["decode"], runners["prefill"]
    weights = _load_weights(path, runners)

    def call(input_ids: Tensor, *arguments: Any, held: dict[str, Tensor] = weights) -> Tensor:
        # compiled code takes the strides it was traced with for granted; what it mutates is contiguous anyway
        arguments = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        return (decode if input_ids.numel() <= FEW_TOKENS else prefill)(input_ids.contiguous(), *arguments)

    return step_program(call, json.loads(decode.get_metadata()["exgen"]), torch.device("cpu"))


def _load_weights(path: Path, runners: dict[str, Any]) -> dict[str, Tensor]:
    """Hand the package's weights to all of `runners`, which hold bare pointers: keep what is returned as long as them.

    `load_pt2` can do this too, but lets go of the weights, and the runners then read freed memory.
    """
    weights = {}
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}  # without the archive's own folder
        for short, name in names.items():
            if short.startswith("data/weights/"):
                weights[short.rpartition("/")[2]] = torch.load(io.BytesIO(archive.read(name)))
        for entry, runner in runners.items():
            parts = json.loads(archive.read(names[f"data/aotinductor/{entry}/weights_config.json"]))
            views = {key: weights[file].as_strided(*view) for key, (file, *view) in parts.items()}
            runner.load_constants(views, check_full_update=True, user_managed=True)
    return weights


def _replace_linears(module: torch.fx.GraphModule) -> None:
    """On a CPU, MKL multiplies one row on one thread, and few rows slowly: 60 to 104 ms for SmolLM2's 1 to 16 rows.

    The transposed product of an even number of rows takes 30 to 67 ms.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            node.target = _linear
    module.recompile()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW_TOKENS:
        return torch.nn.functional.linear(x, weight, bias)
    even = torch.nn.functional.pad(rows, (0, 0, 0, len(rows) % 2))
    out = (weight @ even.t())[:, : len(rows)].t().contiguous().unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


def step_program(call: Callable[..., Tensor], metadata: dict[str, Any], device: torch.device) -> Program:
    """The native kind: `call` has the contract of `export_for_generation`, keys and values are `[b, h, l, d]`."""
    shapes = metadata["keys"] + metadata["values"]
    dtype = getattr(torch, metadata["dtype"])
    layers = len(metadata["keys"])

    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        tensors: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        keys, values = tensors[:layers], tensors[layers:]
        logits = call(input_ids, position_ids, slots, visible, logits_at, slot_positions, keys, values)
        return logits, tensors

    def empty(b: int, l: int) -> list[Tensor]:
        # Zeros: a masked slot's weight is 0, and 0 times what uninitialised memory may hold is NaN.
        return [torch.zeros(b, h, l, d, dtype=dtype, device=device) for h, d in shapes]

    return Program(
        step=step,
        empty=empty,
        slot_axes=(2,) * len(shapes),
        free_slots=True,
        max_slots=None,
        max_feed=None,
        vocab_size=metadata["vocab_size"],
        max_positions=metadata["max_positions"],
        generation_config=metadata["generation_config"],
        device=device,
    )


def _device(exported: ExportedProgram) -> torch.device:
    held = [*exported.state_dict.values(), *exported.constants.values()]
    return next((t.device for t in held if isinstance(t, Tensor)), torch.device("cpu"))
