"""One calling convention over every kind of exported artifact.

`load(exported)` opens an artifact once and returns a `Program`: a pure function from tokens and state to logits and
state, and what the loop must know about it. No other file knows what kind of artifact runs.

    program = load("model.pt2")
    tensors = program.empty(1, 16)                               # the cache of one row, 16 slots, nothing read yet
    logits, tensors = program.step(input_ids, position_ids, slots, visible, logits_at, slot_positions, tensors)
"""

import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import load_pt2

Step = Callable[..., tuple[Tensor, list[Tensor]]]


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


def load(exported: "Program | ExportedProgram | str | Path") -> Program:
    """Open an artifact: an `ExportedProgram`, or a path to one saved with `torch.export.save`.

    Opening takes seconds on a 30-layer model and happens once per artifact: the same object, or the same unchanged
    file, is never opened twice. Raises `FileNotFoundError` or `ValueError` for what is not a program, and `TypeError`
    for other objects.
    """
    if isinstance(exported, Program):
        return exported
    if isinstance(exported, ExportedProgram):
        if exported not in _opened:
            _opened[exported] = open_exported_program(exported)
        return _opened[exported]
    if isinstance(exported, str | Path):
        return _open_file(Path(exported))
    raise TypeError(
        f"exported is a {type(exported).__name__}; give a torch.export.ExportedProgram, the path of one saved with "
        "torch.export.save, or what exgen.load returned"
    )


_opened: "WeakKeyDictionary[ExportedProgram, Program]" = WeakKeyDictionary()
_opened_files: "OrderedDict[tuple[Path, int, int], Program]" = OrderedDict()
_FILES_KEPT = 2  # a program holds its model's weights


def _open_file(path: Path) -> Program:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give the path of a program saved with torch.export.save")
    stat = path.stat()
    key = (path.resolve(), stat.st_mtime_ns, stat.st_size)
    if key not in _opened_files:
        _opened_files[key] = _opener(path)(path)
    _opened_files.move_to_end(key)
    while len(_opened_files) > _FILES_KEPT:
        _opened_files.popitem(last=False)
    return _opened_files[key]


def _opener(path: Path) -> Callable[[Path], Program]:
    """The function that opens `path`, told by the archive's contents."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any("/data/aotinductor/" in name for name in names):
            return open_package
        if any(name.endswith("/archive_version") for name in names):
            return lambda path: open_exported_program(torch.export.load(path))
    raise ValueError(
        f"{path} is no exported program: supported are files written by torch.export.save, and packages of "
        "exgen.compile_for_generation"
    )


def open_exported_program(exported: ExportedProgram) -> Program:
    """Open an exported program of any supported kind. Raises `ValueError`, with its signature, where none fits."""
    metadata = exported.graph_module.meta.get("custom", {}).get("exgen")
    if metadata is None:
        inputs = [f"{name}" for name in exported.graph_signature.user_inputs]
        raise ValueError(
            f"this program's signature is not understood: inputs {inputs}, outputs "
            f"{list(exported.graph_signature.user_outputs)}; export the model with exgen.export_for_generation"
        )
    module = exported.module(check_guards=False)
    device = _device(exported)
    if device.type == "cpu":
        _replace_linears(module)
    return step_program(module, json.loads(metadata), device)


FEW_TOKENS = 16  # calls of up to as many tokens are quicker through a package's `decode` entry point


def open_package(path: Path) -> Program:
    """Open an AOTInductor package of `compile_for_generation`: `decode` and `prefill` over one copy of the weights."""
    runners = load_pt2(str(path), load_weights_from_disk=True).aoti_runners
    if runners.keys() != {"decode", "prefill"}:
        raise ValueError(
            f"{path} has the entry points {sorted(runners)}: make a package with exgen.compile_for_generation"
        )
    decode, prefill = runners["decode"], runners["prefill"]

    def call(input_ids: Tensor, *arguments: Any) -> Tensor:
        return (decode if input_ids.numel() <= FEW_TOKENS else prefill)(input_ids, *arguments)

    return step_program(call, json.loads(decode.get_metadata()["exgen"]), torch.device("cpu"))


def _replace_linears(module: torch.fx.GraphModule) -> None:
    """On a CPU, MKL multiplies one row on one thread, and few rows slowly: 60 to 104 ms for SmolLM2's 1 to 16 rows.

    The transposed product of an even number of rows takes 30 to 67 ms, and is no slower for a whole prompt.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            node.target = _linear
    module.recompile()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
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
