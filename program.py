"""One calling convention over every kind of exported artifact.

`load(exported)` opens an artifact once and returns a `Program`: a pure function from tokens and state to logits and
state, and what the loop must know about it. No other file knows what kind of artifact runs.

    program = load("model.pt2")
    tensors = program.empty(1, 16)                               # the cache of one row, 16 slots, nothing read yet
    logits, tensors = program.step(input_ids, position_ids, slots, visible, logits_at, slot_positions, tensors)

Programs of other recipes are read from their graphs, never known by a model's name:

| the graph | what becomes its state |
| --- | --- |
| writes to buffers, constants or inputs | what it writes to, as arguments; rows of a one-row program run under vmap |
| takes cache tensors and returns them longer | those tensors, in slots of a static cache |
| keeps nothing | the text: every token computes all of it again |
"""

import copy
import io
import json
import logging
import mmap
import operator
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from einops import repeat
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.export.pt2_archive._package import load_pt2
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

Step = Callable[..., tuple[Tensor, list[Tensor]]]


class Program(NamedTuple):
    """An opened artifact.

    `step(input_ids [b, s], position_ids [b, s], slots [b, s], visible [b, s, m], logits_at [n], slot_positions [b, l],
    tensors)` feeds `s` tokens to each of `b` rows and returns `(logits [b, n, v], tensors)`. All indices are int64,
    `visible` is bool. Each token writes its key and value to its slot and attends to the slots it may see, its own
    included, of the first `m <= l`. `slot_positions` is updated in place; `tensors` is the state, rows first, mutated
    or replaced.
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
    max_rows: int | None = None  # texts that it can hold at once


def load(exported: Program | ExportedProgram | str | Path) -> Program:
    """Open an artifact: an `ExportedProgram`, or a path to one saved with `torch.export.save`.

    Opening takes seconds on a 30-layer model and happens once per artifact: the same object, or the same unchanged
    file, is never opened twice. Raises `FileNotFoundError` or `ValueError` for what is not a program, and `TypeError`
    for other objects.
    """
    with _opening:
        return _open(exported)


def _open(exported: Any) -> Program:
    if isinstance(exported, Program):
        return exported
    if isinstance(exported, ExportedProgram):
        if exported not in _opened:
            _opened[exported] = open_exported_program(exported)
        return _opened[exported]
    if isinstance(exported, str | Path):
        path = Path(exported)
        return _open_folder(path) if path.is_dir() else _open_file(path)
    if hasattr(exported, "components"):
        return _open_exported_model(exported)
    raise TypeError(
        f"exported is a {type(exported).__name__}; give a torch.export.ExportedProgram, the path of one saved with "
        "torch.export.save, or what exgen.load returned"
    )


_opening = RLock()  # threads that ask for one artifact at once wait for one of them to open it
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
            return lambda path: open_exported_program(_load_exported_program(path))
    with path.open("rb") as file:
        if file.read(8)[4:] == b"ET12":
            return open_pte
    raise ValueError(
        f"{path} is no exported program: supported are files written by torch.export.save, AOTInductor packages, and "
        "ExecuTorch programs"
    )


def _load_exported_program(path: Path) -> ExportedProgram:
    """`torch.export.load`, also where the program was exported with containers of its own, as transformers' caches.

    Only the tensors in them matter here: they are inputs and outputs of the graph, one by one.
    """
    with zipfile.ZipFile(path) as archive:
        graphs = [archive.read(name).decode() for name in archive.namelist() if name.endswith("models/model.json")]
    names = {name for graph in graphs for name in re.findall(r'\\"type\\+": \\+"(\w+[.:][\w.:]+)', graph)}
    for name in names - pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.keys():
        pytree.register_pytree_node(
            type(name, (tuple,), {}), lambda held: (list(held), None), lambda held, _: held, serialized_type_name=name
        )
    log = logging.getLogger("torch._export.serde.serialize")
    disabled, log.disabled = log.disabled, True  # its warning of pickled containers cannot be formatted, and so prints
    try:
        return torch.export.load(path)
    finally:
        log.disabled = disabled


def _open_exported_model(model: Any) -> Program:
    """Open transformers' `ExportedModel`: its `decode` reads prompts too, from an empty cache."""
    program = load(_decode({name: component.program for name, component in model.components.items()}))
    configs = [config.to_dict() for config in (model.config, model.generation_config) if config is not None]
    return program._replace(generation_config=_defaults(*configs))


def _open_folder(path: Path) -> Program:
    """Open a folder that transformers' `ExportedModel.save_pretrained` wrote."""
    if not (path / "export.json").is_file():
        raise ValueError(f"{path} is a folder without an export.json: give what ExportedModel.save_pretrained wrote")
    components = json.loads((path / "export.json").read_text())["components"]
    program = _open_file(path / _decode({name: component["file"] for name, component in components.items()}))
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


def open_exported_program(exported: ExportedProgram) -> Program:
    """Open a step program, or one of another recipe through `adapt`. Raises `ValueError` for what is neither."""
    metadata = exported.graph_module.meta.get("custom", {}).get("exgen")
    if metadata is None:
        fields = adapt(read_graph(exported))._asdict()
        return Program(**fields, free_slots=False, max_positions=None, generation_config={})
    module = exported.module(check_guards=False)
    device = _device(exported)
    if device.type == "cpu":
        _replace_linears(module)
    return step_program(module, json.loads(metadata), device)


FEW_TOKENS = 16  # what is quick for one token stays so for up to as many


def open_package(path: Path) -> Program:
    """Open an AOTInductor package: `compile_for_generation`'s, or of one program, our step program or another."""
    runners = load_pt2(str(path)).aoti_runners
    weights = _load_weights(path, runners)
    sized = runners.keys() == {"one", "few", "many", "prompt"}  # compile_for_generation's, for as many tokens
    if len(runners) > 1 and not sized:
        raise ValueError(
            f"{path} has the entry points {sorted(runners)}: compile one program, or make a package with "
            "exgen.compile_for_generation"
        )
    name = "one" if sized else next(iter(runners))
    metadata = runners[name].get_metadata().get("exgen")
    if metadata is None:
        fields = adapt(read_package(path, name, runners[name]))._asdict()
        return Program(**fields, free_slots=False, max_positions=None, generation_config={})

    def call(input_ids: Tensor, *arguments: Any, held: dict[str, Tensor] = weights) -> Tensor:
        # compiled code takes the strides it was traced with for granted; what it mutates is contiguous anyway
        arguments = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        entry = _entry(*input_ids.shape) if sized else name
        return runners[entry](input_ids.contiguous(), *arguments)

    return step_program(call, json.loads(metadata), _package_device(runners[name]))


def _entry(b: int, s: int) -> str:
    """The entry point of `compile_for_generation`'s packages for `s` tokens of each of `b` rows."""
    if s >= 64:  # in four pieces, which beams and samples, one after another, would each attend to
        return "prompt"
    return "one" if b * s == 1 else "few" if b * s <= 6 else "many"


def open_pte(path: Path) -> Program:
    """Open an ExecuTorch program: a step program as examples/executorch.py lowers it, or one that hides its cache."""
    try:
        from executorch.runtime import Runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"{path} is an ExecuTorch program, which needs its runtime: pip install executorch"
        ) from error
    held = Runtime.get().load_program(path)
    if "exgen" not in held.method_names:
        fields = read_pte(path, held)._asdict()
        return Program(**fields, free_slots=False, max_positions=None, generation_config={})
    metadata = json.loads(held.load_method("exgen").execute([])[0])
    most, forward, lock = metadata["most"], held.load_method("forward"), Lock()

    def call(*arguments: Any) -> Tensor:
        """ExecuTorch returns what a program mutates, ahead of its logits; `most["rows"]` rows run in a call."""
        *fed, logits_at, slot_positions, keys, values = arguments
        state, logits = [slot_positions, *keys, *values], []
        for i in range(0, len(slot_positions), most["rows"]):
            rows = slice(i, i + most["rows"])
            # a clone has the strides of its sizes, which ExecuTorch tells layouts by
            inputs = [t[rows].clone(memory_format=torch.contiguous_format) for t in fed]
            with lock:  # calls share their memory, but for outputs, which are copied
                *changed, part = forward.execute([*inputs, logits_at, *(t[rows].contiguous() for t in state)])
            logits.append(part)
            for t, new in zip(state, changed, strict=True):
                t[rows] = new
        return torch.cat(logits)

    program = step_program(call, metadata, torch.device("cpu"))
    return program._replace(max_slots=most["slots"], max_feed=most["tokens"])


def _of_all_slots(visible: Tensor, slot_positions: Tensor) -> Tensor:
    """`visible` `[b, s, m]` as `[b, s, l]`, for programs that look at all their slots."""
    return torch.nn.functional.pad(visible, (0, slot_positions.shape[1] - visible.shape[2]))


def _package_device(runner: Any) -> torch.device:
    return torch.device(runner.get_metadata().get("AOTI_DEVICE_KEY", "cpu"))


def _load_weights(path: Path, runners: dict[str, Any]) -> dict[str, Tensor]:
    """Hand weights that are beside the code to `runners`, which hold bare pointers: keep what is returned as long.

    `load_pt2` can do this too, but lets go of the weights, and the runners then read freed memory.
    """
    weights = {}
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}  # without the archive's own folder
        files = {short: name for short, name in names.items() if short.startswith("data/weights/")}
        place = _huge_pages(sum(archive.getinfo(name).file_size for name in files.values()))
        for short, name in files.items():
            weights[short.rpartition("/")[2]] = place(torch.load(io.BytesIO(archive.read(name))))
        for entry, runner in runners.items() if weights else ():
            parts = json.loads(archive.read(names[f"data/aotinductor/{entry}/weights_config.json"]))
            views = {key: weights[file].as_strided(*view) for key, (file, *view) in parts.items()}
            runner.load_constants(views, check_full_update=True, user_managed=True)
    return weights


HUGE = 2**21  # bytes of a huge page
LINE = 64  # bytes of a cache line


def _huge_pages(size: int) -> Callable[[Tensor], Tensor]:
    """A function that moves tensors, `size` bytes in all, into memory of huge pages, where the system has them.

    A step reads every weight once, and finding their pages of the usual 4 KB took a tenth of its time.
    """
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return lambda tensor: tensor
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    used = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal used
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        # each has a storage of its own: a runner takes a storage's start for its tensor's
        room = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start + used)
        used += -(-tensor.nbytes // LINE) * LINE
        return room.view(tensor.shape).copy_(tensor.detach())

    return place


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


FORMAT = 2  # of export_for_generation's contract


def step_program(call: Callable[..., Tensor], metadata: dict[str, Any], device: torch.device) -> Program:
    """The native kind: `call` has the contract of `export_for_generation`, keys and values are `[b, h, l, d]`."""
    if metadata["format"] != FORMAT:
        raise ValueError("this program was exported by another version of exgen: export the model again")
    shapes = metadata["keys"] + metadata["values"]
    dtype = getattr(torch, metadata["dtype"])
    ends = len(metadata["keys"]), len(shapes)
    states = metadata.get("states", [])

    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        tensors: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        kept = [tensors[: ends[0]], tensors[ends[0] : ends[1]], tensors[ends[1] :]]
        logits = call(input_ids, position_ids, slots, visible, logits_at, slot_positions, *kept[: 3 if states else 2])
        return logits, tensors

    def empty(b: int, l: int) -> list[Tensor]:
        # Zeros: a masked slot's weight is 0, and 0 times what uninitialised memory may hold is NaN.
        slots = [torch.zeros(b, h, l, d, dtype=dtype, device=device) for h, d in shapes]
        return slots + [torch.zeros(b, *size, dtype=getattr(torch, name), device=device) for size, name in states]

    return Program(
        step=step,
        empty=empty,
        slot_axes=(2,) * len(shapes) + (None,) * len(states),
        free_slots=not states,
        max_slots=None,
        max_feed=1 if states else None,
        vocab_size=metadata["vocab_size"],
        max_positions=metadata["max_positions"],
        generation_config=metadata["generation_config"],
        device=device,
    )


def _device(exported: ExportedProgram) -> torch.device:
    held = [*exported.state_dict.values(), *exported.constants.values()]
    return next((t.device for t in held if isinstance(t, Tensor)), torch.device("cpu"))


# --- programs of other recipes ----------------------------------------------------------------------------------------

INTEGERS = (torch.int64, torch.int32)
Size = int | str  # a number, or the symbol of a dynamic size


class Adapted(NamedTuple):
    """A program whose rows hold a text each, unpadded, in slots 0, 1, 2, ...; `step` is called as `program.py` says."""

    step: Callable[..., tuple[Tensor, list[Tensor]]]
    empty: Callable[[int, int], list[Tensor]]  # (b, l) -> the state of b rows with l slots that have read nothing
    slot_axes: tuple[int | None, ...]  # None: a state without slots
    max_slots: int | None
    max_feed: int | None
    vocab_size: int
    device: torch.device
    max_rows: int | None = None


class Graph(NamedTuple):
    """An exported program with its state as an argument."""

    call: Callable[
        [list[Any], list[Tensor]], tuple[Tensor, list[Tensor]]
    ]  # (inputs, state) -> (logits [b, s or 1, v], state)
    roles: list[str]  # of the inputs; `feed` says what each is given
    inputs: list[Any]  # as traced: tensors without data, or constants
    state: list[Tensor]  # initial values, or where the caller brings them tensors without data
    grows: bool  # state comes back longer, by the tokens fed
    b: Size
    s: Size
    ranges: dict[str, tuple[int, int | None]]  # from, to: of each symbol
    last_only: bool  # logits of the last token alone
    vmaps: bool
    catches: bool  # raises where a slot is not there
    vocab_size: int
    device: torch.device
    signature: str

    def least(self, size: Size) -> int:
        return size if isinstance(size, int) else self.ranges.get(size, (0, None))[0]

    def most(self, size: Size) -> int | None:
        return size if isinstance(size, int) else self.ranges.get(size, (0, None))[1]


class Traced(NamedTuple):
    """An input as a compiled program describes it."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


class Fed(NamedTuple):
    """What rows are fed."""

    ids: Tensor  # [r, s]
    positions: Tensor  # [r, s]
    visible: Tensor  # [r, s, l]


Ran = tuple[Tensor, list[Tensor]]  # logits [r, s or 1, v], and the state, rows first
Rows = Callable[[Fed, list[Tensor]], Ran]


@torch.no_grad()
def adapt(graph: Graph) -> Adapted:
    """Any number of rows of `graph`. Raises `ValueError`, with its signature, where it cannot be fed a token."""
    return with_state(graph) if graph.state else without_state(graph)


def with_state(graph: Graph) -> Adapted:
    fixed = isinstance(graph.b, int)
    layouts = [layout(t, graph.b) for t in graph.state]
    axes = [slot for _, slot in layouts]
    if graph.grows and None in axes:
        raise ValueError(
            f"this program takes a cache of one fixed length: {graph.signature}; export it with a dynamic length, or "
            "the model with exgen.export_for_generation"
        )

    def empty(b: int, l: int) -> list[Tensor]:
        return [empty_state(t, *axes, b, l, graph.device) for t, axes in zip(graph.state, layouts, strict=True)]

    rows = stacked(graph) if fixed else batched(graph, [row for row, _ in layouts])
    if graph.grows:
        rows = growing(rows, axes)
    if graph.grows or not fixed:
        rows = grouped(rows, None if fixed else graph.most(graph.b))
    slots = None
    if not any(axes):  # the state has fixed sizes
        axes, slots = find_slots(rows, empty(1, 0), graph)
    if isinstance(graph.s, int) and graph.s > 1:
        if graph.last_only or slots is None or None in axes:
            raise ValueError(f"this program takes no fewer than {graph.s} tokens: {graph.signature}; export it with 1")
        rows, slots = filled(rows, graph.s), slots - graph.s + 1
    return Adapted(as_step(rows), empty, tuple(axes), slots, graph.most(graph.s), graph.vocab_size, graph.device)


def without_state(graph: Graph) -> Adapted:
    fixed = isinstance(graph.s, int)
    if graph.s == 1:
        raise ValueError(
            f"this program takes one token and keeps nothing of those before it: {graph.signature}. If its model has a "
            "cache, the compiler lost it (as PyTorch issue 165444); export the model with exgen.export_for_generation"
        )
    if graph.last_only and fixed:
        raise ValueError(
            f"this program scores the last of {graph.s} tokens alone: {graph.signature}; export it with all logits"
        )
    warnings.warn(
        "this program keeps no cache: each new token computes its whole text again, so that n new tokens cost n texts; "
        "exgen.export_for_generation makes programs that read each token once",
        stacklevel=5,
    )
    graph = graph._replace(roles=[mask_or_positions(graph, i) for i in range(len(graph.roles))])
    rows = recomputing(stacked(graph) if graph.b == 1 else grouped(batched(graph, []), graph.most(graph.b)), graph)
    if graph.last_only:
        rows = grouped(rows, None)

    def empty(b: int, l: int) -> list[Tensor]:
        return [torch.zeros(b, l, dtype=torch.int64, device=graph.device)]

    return Adapted(as_step(rows), empty, (1,), graph.most(graph.s), None, graph.vocab_size, graph.device)


def as_step(rows: Rows) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        visible: Tensor,
        logits_at: Tensor,
        slot_positions: Tensor,
        tensors: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        logits, tensors = rows(Fed(input_ids, position_ids, _of_all_slots(visible, slot_positions)), tensors)
        return (logits[:, logits_at] if logits.shape[1] > 1 else logits), list(tensors)

    return step


# --- rows: from what the graph takes to any number of rows, at any positions ------------------------------------------


def stacked(graph: Graph) -> Rows:
    """Rows for a fixed number `b`: each row has a state of its own and runs as the first of `b` equal ones."""

    def one(fed: Fed, state: list[Tensor]) -> Ran:
        logits, state = graph.call(feed(graph, Fed(*(t.expand(graph.least(graph.b), *t.shape) for t in fed))), state)
        return logits[0], state

    vmapped = torch.vmap(one)

    def run(fed: Fed, state: list[Tensor]) -> Ran:
        r = len(fed.ids)
        if graph.vmaps and r > 1:
            return vmapped(fed, state)
        each = [one(Fed(*(t[i] for t in fed)), [t[i] for t in state]) for i in range(r)]
        logits, states = zip(*each, strict=True)
        pairs = zip(state, zip(*states, strict=True), strict=True)
        # what was written in place is there already
        return torch.stack(logits), [t if new[0].data_ptr() == t.data_ptr() else torch.stack(new) for t, new in pairs]

    return run


def batched(graph: Graph, row_axes: list[int | None]) -> Rows:
    """Rows of equal positions for any `b`, beside copies of the last one where the program takes no fewer."""

    def fill(t: Tensor) -> Tensor:
        missing = graph.least(graph.b) - len(t)
        return t if missing <= 0 else torch.cat([t, t[-1:].expand(missing, *t.shape[1:])])

    def run(fed: Fed, state: list[Tensor]) -> Ran:
        r = len(fed.ids)
        # what has no axis of rows is shared by all of them, as a count of the tokens read
        given = [t[0] if a is None else fill(t).movedim(0, a) for t, a in zip(state, row_axes, strict=True)]
        logits, given = graph.call(feed(graph, Fed(*map(fill, fed))), given)
        pairs = zip(given, row_axes, strict=True)
        return logits[:r], [
            repeat(t, "... -> r ...", r=r).clone() if a is None else t.movedim(a, 0)[:r] for t, a in pairs
        ]

    return run


def grouped(rows: Rows, most: int | None) -> Rows:
    """Rows at any positions from `rows` of equal ones, `most` at a time."""

    def run(fed: Fed, state: list[Tensor]) -> Ran:
        starts = fed.positions[:, 0]
        equal = [(starts == start).nonzero()[:, 0] for start in starts.unique()]
        groups = [group for indices in equal for group in indices.split(most or len(indices))]
        if len(groups) == 1:
            return rows(fed, state)
        logits = []
        for group in groups:
            part, changed = rows(Fed(*(t[group] for t in fed)), [t[group] for t in state])
            logits.append(part)
            for t, new in zip(state, changed, strict=True):
                t[group] = new
        return torch.cat(logits)[torch.cat(groups).argsort()], state

    return run


def growing(rows: Rows, slot_axes: list[int | None]) -> Rows:
    """Rows that keep their slots in place, from `rows` that take what was read and return it longer."""

    def run(fed: Fed, state: list[Tensor]) -> Ran:
        past, s = int(fed.positions[0, 0]), fed.ids.shape[1]
        read = [t.narrow(axis or 0, 0, past) for t, axis in zip(state, slot_axes, strict=True)]
        logits, longer = rows(fed._replace(visible=fed.visible[:, :, : past + s]), read)
        for t, new, axis in zip(state, longer, slot_axes, strict=True):
            t.narrow(axis or 0, past, s).copy_(new.narrow(axis or 0, past, s))
        return logits, state

    return run


def filled(rows: Rows, length: int) -> Rows:
    """Calls of any `s` up to `length` from `rows` that take exactly as many: what fills them is overwritten later."""

    def run(fed: Fed, state: list[Tensor]) -> Ran:
        s = fed.ids.shape[1]
        at = torch.arange(length, device=fed.ids.device)
        nearest = at.clamp(max=s - 1)
        logits, state = rows(Fed(fed.ids[:, nearest], fed.positions[:, :1] + at, fed.visible[:, nearest]), state)
        return logits[:, :s], state

    return run


def recomputing(rows: Rows, graph: Graph) -> Rows:
    """Rows whose state is their text `[r, l]`. What fills it on its right is not read: language models are causal."""
    least = 1 if graph.last_only else graph.least(graph.s)  # the last token's logits must be the text's

    def run(fed: Fed, state: list[Tensor]) -> Ran:
        text = state[0].scatter_(1, fed.positions, fed.ids)
        end = max(int(fed.positions.max()) + 1, least)
        text = torch.nn.functional.pad(text, (0, end - text.shape[1]))
        every = torch.arange(end, device=text.device)
        causal = (every <= every[:, None]).expand(len(text), -1, -1)
        logits, _ = rows(Fed(text, every.expand(len(text), -1), causal), [])
        return (logits if graph.last_only else logits.take_along_dim(fed.positions[:, :, None], dim=1)), state

    return run


def feed(graph: Graph, fed: Fed) -> list[Any]:
    """A value for each input of `graph`."""

    def value(role: str, traced: Any) -> Any:
        if role == "constant":
            return traced
        if role in ("mask", "visible"):
            wide = fed.visible.shape[2] if isinstance(size := sizes(traced)[-1], str) else size
            visible = torch.nn.functional.pad(fed.visible, (0, wide - fed.visible.shape[2]))
            if role == "mask":  # of tokens: what the last one sees
                return visible[:, -1].to(traced.dtype)
            visible = {2: visible[0], 3: visible, 4: visible[:, None]}[len(traced.shape)]
            return additive(visible, traced.dtype) if traced.dtype.is_floating_point else visible.to(traced.dtype)
        first = fed.positions[0, 0]
        values = {"tokens": fed.ids, "positions": fed.positions[0], "positions of rows": fed.positions}
        return (first.reshape(traced.shape) if role == "start" else values[role]).to(traced.dtype)

    return [value(role, traced) for role, traced in zip(graph.roles, graph.inputs, strict=True)]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


# --- the state --------------------------------------------------------------------------------------------------------


def layout(state: Tensor, b: Size) -> tuple[int | None, int | None]:
    """The program's axis of rows, and the dynamic axis of slots once rows come first."""
    shape = sizes(state)
    row = shape.index(b) if isinstance(b, str) and b in shape else None
    rest = [size for axis, size in enumerate(shape) if axis != row]
    return row, next((axis + 1 for axis, size in enumerate(rest) if isinstance(size, str)), None)


def empty_state(state: Tensor, row: int | None, slot: int | None, b: int, l: int, device: torch.device) -> Tensor:
    if not isinstance(state, FakeTensor):
        return repeat(state, "... -> b ...", b=b).clone()
    shape = [b, *(size for axis, size in enumerate(sizes(state)) if axis != row)]
    return torch.zeros(
        [l if axis == slot else int(n) for axis, n in enumerate(shape)], dtype=state.dtype, device=device
    )


def find_slots(rows: Rows, state: list[Tensor], graph: Graph) -> tuple[list[int | None], int | None]:
    """The slot axis of each tensor and how many slots there are, told by what calls write."""
    s = graph.s if isinstance(graph.s, int) else 1
    masks = [t for t, role in zip(graph.inputs, graph.roles, strict=True) if role in ("mask", "visible")]
    every = torch.arange(int(masks[0].shape[-1]) if masks else 1, device=graph.device)
    ids = torch.ones(1, s, dtype=torch.int64, device=graph.device)

    def call(state: list[Tensor], start: int) -> list[Tensor]:
        positions = torch.arange(start, start + s, device=graph.device)
        return rows(Fed(ids, positions[None], (every <= positions[:, None])[None]), [t.clone() for t in state])[1]

    def moves_on(state: list[Tensor], n: int, which: list[int]) -> bool:
        """Whether `n` slots take one token more and do not write it to the third slots, as if the next in order."""
        try:
            after = call(state, n)
        except (IndexError, RuntimeError):
            return False
        in_order = range(2 * s, 3 * s)
        return not any(torch.equal(after[i], state[i]) or written_axis(state[i], after[i], in_order) for i in which)

    first = call(state, 0)
    second = call(first, s)
    axes = [written_axis(before, after, range(s, 2 * s)) for before, after in zip(first, second, strict=True)]
    lengths = [0 if axis is None else t.shape[axis] for t, axis in zip(state, axes, strict=True)]
    for n in sorted({*lengths} - {0}):
        # Only a window that moves on takes a token more than it has slots: none of its axes holds a text in order.
        which = [i for i, length in enumerate(lengths) if length == n]
        if not graph.catches or not moves_on(second, n, which):
            return axes, n
        axes = [None if i in which else axis for i, axis in enumerate(axes)]
    return axes, None


def written_axis(before: Tensor, after: Tensor, slots: range) -> int | None:
    changed = (before != after).nonzero()
    return next((axis for axis in range(1, before.ndim) if set(changed[:, axis].tolist()) == set(slots)), None)


def mask_or_positions(graph: Graph, i: int) -> str:
    """The role of input `i`: one of the tokens' shape holds their positions, unless a 0 hides its token."""
    if graph.roles[i] != "positions of rows":
        return graph.roles[i]
    s = graph.s if isinstance(graph.s, int) else max(3, graph.least(graph.s))
    every = torch.arange(s, device=graph.device).expand(graph.least(graph.b), -1)
    logits = []
    for first in (0, 1):
        ids = torch.ones_like(every)
        ids[:, 0] = first
        inputs = feed(graph, Fed(ids, every, (every[:, None] <= every[:, :, None])))
        inputs[i] = (every > 0).to(inputs[i].dtype)
        logits.append(graph.call(inputs, [])[0][:, -1])
    return "mask" if torch.allclose(logits[0], logits[1], equal_nan=True) else graph.roles[i]


# --- reading the graph ------------------------------------------------------------------------------------------------


def read_graph(exported: ExportedProgram) -> Graph:
    """`exported` as a pure function. Raises `ValueError` where its inputs or outputs are not understood."""
    nodes = exported.graph_module.graph.nodes
    traced = {node.name: node.meta.get("val") for node in nodes}
    inputs: dict[str, Any] = {}  # by name, as traced
    held: dict[str, Tensor] = {}  # by name: weights, buffers, constants
    owners: dict[str | None, str] = {}
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            inputs[name] = getattr(spec.arg, "value", traced[name])
            owners[name] = name
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            held[name] = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            owners[spec.target] = name
        else:
            raise ValueError(
                f"this program keeps a state in {name!r} ({spec.kind.name}) that cannot be reached, so that texts "
                "would see each other; export the model with exgen.export_for_generation"
            )
    names = [spec.arg.name for spec in exported.graph_signature.input_specs]
    outputs = exported.graph_signature.output_specs
    changed = [
        owners[o.target] for o in outputs if o.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    ]
    values = [traced.get(getattr(o.arg, "name", None)) for o in outputs][len(changed) :]  # what is changed comes first
    signature = describe(inputs, values)

    written = written_inputs(exported) | set(changed)
    lookups = [node for node in nodes if node.target is torch.ops.aten.embedding.default]
    tokens = find_tokens(inputs, {base(node.args[1]).name for node in lookups})
    scores = next((i for i, t in enumerate(values) if is_scores(t)), None)
    if tokens is None or scores is None:
        raise ValueError(not_understood(signature))
    logits: Tensor = values[scores]  # type: ignore[assignment]
    b, s = sizes(inputs[tokens])
    roles = {name: find_role(value, b, s) for name, value in inputs.items()}
    roles |= {tokens: "tokens"} | {name: "state" for name in written & inputs.keys()}
    kept = [name for name in names if name in written or roles.get(name) == "state"]
    longer = [i for i, t in enumerate(values) if i != scores and isinstance(t, Tensor)]
    grows = bool(kept) and not written
    if None in roles.values() or (grows and len(longer) != len(kept)):
        raise ValueError(not_understood(signature))
    fed = [name for name in inputs if roles[name] != "state"]
    module = callable_module(exported.graph_module)
    device = _device(exported)

    def call(inputs: list[Any], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        given = {**held, **dict(zip(fed, inputs, strict=True)), **dict(zip(kept, state, strict=True))}
        results = module(*(given[name] for name in names))
        replaced = dict(zip(changed, results, strict=False))
        results = results[len(changed) :]
        state = [results[i] for i in longer] if grows else [replaced.get(name, given[name]) for name in kept]
        return results[scores] if results[scores].ndim == 3 else results[scores][:, None], state

    return Graph(
        call=call,
        roles=[str(roles[name]) for name in fed],
        inputs=[inputs[name] for name in fed],
        state=[held[name] if name in held else inputs[name] for name in kept],
        grows=grows,
        b=b,
        s=s,
        ranges={
            str(symbol): (int(r.lower), int(r.upper) if r.upper.is_Integer else None)
            for symbol, r in exported.range_constraints.items()
        },
        last_only=logits.ndim == 2 or sizes(logits)[1] != s,
        vmaps=not any(node.target in READS_VALUES for node in nodes),
        catches=device.type == "cpu",
        vocab_size=int(logits.shape[-1]),
        device=device,
        signature=signature,
    )


def is_scores(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3)


def sizes(tensor: Tensor | Traced) -> list[Size]:
    return [int(text) if text.isdigit() else text for text in map(str, tensor.shape)]


def describe(inputs: dict[str, Any], outputs: list[Any]) -> str:
    def text(value: Any) -> str:
        if not isinstance(value, Tensor | Traced):
            return repr(value)
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, sizes(value)))}]"

    given = [f"{name}: {text(value)}" for name, value in inputs.items()]
    return f"({', '.join(given)}) -> ({', '.join(map(text, outputs))})"


def not_understood(signature: str) -> str:
    return (
        f"this program's signature is not understood: {signature}. Understood are integer tokens [b, s], with or "
        "without positions [s] or [b, s], a first position [1], a mask of tokens [b, l] or of what each sees "
        "[b, 1, s, l], and cache tensors that are written to or returned longer; and logits [b, s, v], [b, 1, v] or "
        "[b, v]. Or export the model with exgen.export_for_generation"
    )


def find_tokens(inputs: dict[str, Any], looked_up: set[str]) -> str | None:
    """The integers `[b, s]` that are looked up in a table, or else the first of that shape."""
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor | Traced)}
    shaped = [name for name, t in tensors.items() if len(t.shape) == 2 and t.dtype in INTEGERS]
    return next((name for name in shaped if name in looked_up), shaped[0] if shaped else None)


def find_role(value: Any, b: Size, s: Size) -> str | None:
    """What an input other than tokens means, by its sizes; None: unknown."""
    if not isinstance(value, Tensor | Traced):
        return "constant"
    shape, integers, floats = sizes(value), value.dtype in INTEGERS, value.dtype.is_floating_point
    if integers and shape in ([s], [b, s]):
        return "positions" if len(shape) == 1 else "positions of rows"
    if integers and shape in ([], [1]):
        return "start"
    if not integers and len(shape) >= 2 and shape[-2] == s and (len(shape) < 4 or shape[1] == 1):
        return "visible"
    if not floats and len(shape) == 2 and shape[0] == b:
        return "mask"
    return "state" if floats and len(shape) >= 3 else None


def written_inputs(exported: ExportedProgram) -> set[str]:
    """Names of the inputs, weights and buffers that operations write into, directly or through a view."""
    nodes = exported.graph_module.graph.nodes
    written = set()
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for i, argument in enumerate(schema.arguments):
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {base(leaf).name for leaf in tree_leaves(value) if isinstance(leaf, Node)}
    return written & {node.name for node in nodes if node.op == "placeholder"}


def base(node: Node) -> Node:
    """The node whose memory `node` shows."""
    while (shown := shown_by(node)) is not None:
        node = shown
    return node


def shown_by(node: Node) -> Node | None:
    """The argument that `node` is a view of, as its operation's schema says."""
    schema = getattr(node.target, "_schema", None)
    result = schema.returns[0].alias_info if schema is not None and schema.returns else None
    if node.target is operator.getitem:
        shown = node.args[0]
    elif schema is not None and result is not None:
        sets = [argument.alias_info.before_set if argument.alias_info else set() for argument in schema.arguments]
        shown = next((value for value, names in zip(node.args, sets, strict=False) if names & result.before_set), None)
    else:
        return None
    return shown if isinstance(shown, Node) else None


def callable_module(module: GraphModule) -> GraphModule:
    """A copy that runs on any sizes and under vmap: without its checks, its sizes read as numbers."""
    module = copy.deepcopy(module)
    for part in [m for m in module.modules() if isinstance(m, GraphModule)]:
        for node in reversed(list(part.graph.nodes)):
            if node.target in CHECKS and not node.users:
                part.graph.erase_node(node)
            else:
                node.target = REPLACED.get(node.target, node.target)
        part.recompile()
    return module


def size_of(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis]


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *inputs: Any, **options: Any
) -> Tensor:
    """Attention whose fused CPU kernel has no rule for vmap, which would run it row by row."""
    if not torch._C._functorch.is_batchedtensor(query):
        return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, attn_mask, *inputs, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = additive(attn_mask, query.dtype)
    return torch.ops.aten._scaled_dot_product_attention_math.default(query, key, value, attn_mask, *inputs, **options)[
        0
    ]


def index_copy(tensor: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
    """`index_copy_`, which has no rule for vmap either."""
    return index_put(tensor, [None] * (axis % tensor.ndim) + [index], source)


def index_put(tensor: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """`index_put_` with the indexed axes first: vmap's own rule mistakes the axes where they follow others."""
    at = [axis for axis, index in enumerate(indices) if index is not None]
    if not torch._C._functorch.is_batchedtensor(tensor) or at != list(range(at[0], at[-1] + 1)):
        return torch.ops.aten.index_put_.default(tensor, indices, values, accumulate)
    index = torch.broadcast_tensors(*(indices[axis] for axis in at))
    shape = (*tensor.shape[: at[0]], *index[0].shape, *tensor.shape[at[-1] + 1 :])
    front = [at[0] + i for i in range(index[0].ndim)]
    values = values.expand(shape).movedim(front, list(range(len(front))))
    tensor.movedim(at, list(range(len(at)))).index_put_(index, values, accumulate)
    return tensor


READS_VALUES = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
CHECKS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)
REPLACED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sym_size.int: size_of,
    torch.ops.aten.scaled_dot_product_attention.default: attend,
    torch.ops.aten.index_copy_.default: index_copy,
    torch.ops.aten.index_put_.default: index_put,
    torch.ops.higher_order.wrap_with_set_grad_enabled: lambda _, part, *args: part(*args),
    torch.ops.higher_order.wrap_with_autocast: lambda _, dtype, enabled, cached, part, *args: part(*args),
}


# --- reading a package ------------------------------------------------------------------------------------------------


@torch.no_grad()
def read_package(path: Path, entry: str, runner: Any) -> Graph:
    """A package of another recipe as a pure function. Raises `ValueError` where its inputs or state are not understood.

    Its state, the buffers that calls write to, is inside the runner: a row's is copied in before a call, and out after.
    """
    if is_step_program(runner):
        raise ValueError(
            f"{path} is a step program without its metadata: make the package with exgen.compile_for_generation, or "
            'pass inductor_configs={"aot_inductor.metadata": {"exgen": exported.graph_module.meta["custom"]["exgen"]}}'
        )
    inputs, buffers, ranges = read_source(path, entry)
    signature, tokens = describe(inputs, []), find_tokens(inputs, set())
    if tokens is None:
        raise ValueError(not_understood(signature))
    b, s = sizes(inputs[tokens])
    roles = [("tokens" if name == tokens else find_role(value, b, s)) for name, value in inputs.items()]
    if not {None, "state"}.isdisjoint(roles):
        raise ValueError(not_understood(signature))

    def run(runner: Any, inputs: list[Any]) -> Tensor:
        outputs = runner.loader.run([t.contiguous() for t in inputs])
        logits = next((t for t in outputs if is_scores(t)), None)
        if logits is None:
            raise ValueError(not_understood(signature))
        return logits if logits.ndim == 3 else logits[:, None]

    def call(inputs: list[Any], state: list[Tensor]) -> Ran:
        with lock:  # another thread's call would have its own state inside
            for inside, outside in zip(held, state, strict=True):
                inside.copy_(outside)
            logits = run(runner, inputs)
            return logits, [outside.copy_(inside) for inside, outside in zip(held, state, strict=True)]

    def fed(start: int, *tokens: int) -> list[Any]:
        ids = torch.tensor(tokens, device=device).expand(graph.least(b), -1)
        at = torch.arange(start + len(tokens), device=device)
        return feed(graph, Fed(ids, at[start:].expand_as(ids), (at <= at[start:, None]).expand(len(ids), -1, -1)))

    def last_logits(*tokens: int) -> Tensor:
        state = [torch.zeros_like(t) for t in held]
        return [call(fed(i, token), state)[0] for i, token in enumerate(tokens)][-1]

    lock, device = Lock(), _package_device(runner)
    some = [1] * (s if isinstance(s, int) else 2)
    graph = Graph(
        call=call,
        roles=[str(role) for role in roles],
        inputs=list(inputs.values()),
        state=[],
        grows=False,
        b=b,
        s=s,
        ranges=ranges,
        last_only=False,
        vmaps=False,
        catches=False,
        vocab_size=0,
        device=device,
        signature=signature,
    )
    runner_of_trials = load_pt2(str(path)).aoti_runners[entry]
    tried = {name: torch.zeros([int(n) for n in t.shape], dtype=t.dtype, device=device) for name, t in buffers.items()}
    weights = _load_weights(path, {entry: runner_of_trials})
    runner_of_trials.load_constants(tried, check_full_update=False, user_managed=True)
    logits = run(runner_of_trials, fed(1, *some))  # not at 0, which a count would write where 0 is
    del weights
    written = {name: torch.zeros_like(t) for name, t in tried.items() if t.any()}
    held = list(written.values())
    graph = graph._replace(state=held, vocab_size=logits.shape[-1], last_only=logits.shape[1] != len(some))
    if held:
        if isinstance(s, int) and s > 1:
            raise ValueError(f"this package takes no fewer than {s} tokens: {signature}; export it with 1")
        own = [run(runner, fed(i, token)) for i, token in enumerate((1, 2, 3))][-1]  # with the state it begins with
        # Once: the runner never lets go of what it is handed.
        runner.load_constants(written, check_full_update=False, user_managed=True)
        logits = last_logits(1, 2, 3)
        if not torch.allclose(own, logits, atol=1e-4, rtol=1e-4):
            raise ValueError(f"{path} has a state that does not begin as zeros: {', '.join(written)}. {INSTEAD}")
        if any(torch.equal(logits, last_logits(*others, 3)) for others in ((0, 2), (1, 0))):
            raise ValueError(
                f"{path} writes {', '.join(written)}, but forgets tokens: the compiler broke its state (as in PyTorch "
                f"issue 165444). {INSTEAD}"
            )
    return graph


def is_step_program(runner: Any) -> bool:
    arguments = json.loads(runner.loader.get_call_spec()[0])[1]["children_spec"][0]["children_spec"]
    return [argument["type"] for argument in arguments] == [None] * 6 + ["builtins.list"] * 2


def read_source(
    path: Path, entry: str
) -> tuple[dict[str, Traced], dict[str, Traced], dict[str, tuple[int, int | None]]]:
    """Inputs, buffers and the ranges of symbols, as the C++ source says that a package keeps beside its code."""
    with zipfile.ZipFile(path) as archive:
        parts = [name for name in archive.namelist() if f"/data/aotinductor/{entry}/" in name]
        source = "".join(archive.read(name).decode() for name in parts if name.endswith(".wrapper.cpp"))

    def shape(text: str) -> tuple[Size, ...]:
        parts = [part.strip().removesuffix("L") for part in text.split(",") if part.strip()]
        return tuple(int(part) if part.isdigit() else part for part in parts)

    shapes = dict(re.findall(r"assert_size_stride\((\w+), \{(.*?)\},", source))
    dtypes = dict(re.findall(r"(\w+)_expected_dtype = aoti_torch_dtype_(\w+)\(\)", source))
    names = re.findall(r'inputs_info_\[\d+\]\.name = "(\w+)"', source)
    if not names or not set(names) <= shapes.keys() & dtypes.keys():
        raise ValueError(f"{path} does not hold the source that says which inputs it takes. {INSTEAD}")
    inputs = {name: Traced(shape(shapes[name]), getattr(torch, dtypes[name])) for name in names}
    # a size of 1 works too: that it is at least 2 is what torch assumes of every dynamic one
    ranges: dict[str, tuple[int, int | None]] = {str(n): (1, None) for t in inputs.values() for n in t.shape}
    for name, axis, most in re.findall(r"(\w+)_size\[(\d+)\] > (\d+)\)", source):
        ranges[str(inputs[name].shape[int(axis)])] = (1, int(most))
    constants: dict[str, dict[str, str]] = {}
    for i, field, value in re.findall(r"constants_info_\[(\d+)\]\.(dtype|type|shape|original_fqn) = (.*);", source):
        constants.setdefault(i, {})[field] = value
    buffers = {
        constant["original_fqn"].strip('"'): Traced(
            shape(constant["shape"].strip("{}")), getattr(torch, constant["dtype"].removeprefix("cached_torch_dtype_"))
        )
        for constant in constants.values()
        if "Parameter" not in constant["type"]
    }
    return inputs, buffers, ranges


# --- reading an ExecuTorch program ------------------------------------------------------------------------------------


def read_pte(path: Path, held: Any) -> Adapted:
    """A program of another recipe. A cache inside cannot be reached: one text at a time, from position 0."""
    meta = held.metadata("forward") if "forward" in held.method_names else None
    lengths = [name for name in ("get_max_context_len", "get_max_seq_len") if name in held.method_names]
    dtypes = {3: torch.int32, 4: torch.int64, 6: torch.float32, 11: torch.bool}
    infos = [meta.input_tensor_meta(i) for i in range(meta.num_inputs())] if meta else []
    traced = {f"input {i}": Traced(tuple(t.sizes()), dtypes.get(t.dtype(), torch.float16)) for i, t in enumerate(infos)}
    signature, tokens = describe(dict(traced), []), find_tokens(dict(traced), set())
    instead = "Lower what exgen.export_for_generation makes, as examples/executorch.py does"
    if tokens is not None and traced[tokens].shape[0] == 1 and len(traced) > 2:
        return adapt(pte_with_state(path, held, dict(traced), tokens, signature))
    if tokens is None or len(traced) != 2 or not lengths or traced[tokens].shape[0] != 1:
        raise ValueError(f"{path} is not understood: {signature}, methods {sorted(held.method_names)}. {instead}")
    ids = traced.pop(tokens)
    (name, at), most = next(iter(traced.items())), int(ids.shape[1])
    if at.dtype not in INTEGERS or at.shape not in ((1,), (most,)):
        raise ValueError(f"{path} is not understood: {signature}. {instead}")
    slots = int(held.load_method(lengths[0]).execute([])[0])
    forward, lock, inside = held.load_method("forward"), Lock(), [torch.zeros(0, dtype=torch.int64)]

    def call(text: Tensor, start: int) -> Tensor:
        """Logits `[1, s or 1, v]` of `text` `[t]` from `start` on."""
        for i in range(start, len(text), most):
            positions = torch.arange(i, min(i + most, len(text)))
            given = {tokens: text[None, positions].to(ids.dtype), name: positions[: at.shape[0]].to(at.dtype)}
            logits = forward.execute([given[key] for key in sorted(given)])[0]
        return logits if logits.ndim == 3 else logits[:, None]

    def rows(fed: Fed, state: list[Tensor]) -> Ran:
        text = state[0].scatter_(1, fed.positions, fed.ids)
        start, end = int(fed.positions[0, 0]), int(fed.positions[0, -1]) + 1
        with lock:  # where another text was read since, this one is read again
            known, inside[0] = inside[0], text[0, :0]  # nothing is known of what a failed call leaves
            if start and not torch.equal(known, text[0, :start]):
                call(text[0, :start], 0)
            logits = call(text[0, :end], start)
            inside[0] = text[0, :end].clone()
        return logits, state

    def empty(b: int, l: int) -> list[Tensor]:
        return [torch.zeros(b, l, dtype=torch.int64)]

    v = int(held.metadata("forward").output_tensor_meta(0).sizes()[-1])
    return Adapted(as_step(rows), empty, (1,), slots, most, v, torch.device("cpu"), max_rows=1)


def pte_with_state(path: Path, held: Any, traced: dict[str, "Traced"], tokens: str, signature: str) -> Graph:
    """A program of one row that is handed its cache, of as many slots as its upper bound, and returns it changed."""
    most = int(traced[tokens].shape[1])
    roles = {name: find_role(t, 1, most) for name, t in traced.items()}
    roles |= {name: "state" for name, t in traced.items() if not t.shape}  # a count of the tokens read
    roles[tokens] = "tokens"
    kept = [t for name, t in traced.items() if roles[name] == "state"]
    meta = held.metadata("forward")
    outputs = [meta.output_tensor_meta(i).sizes() for i in range(meta.num_outputs())]
    scores = next((i for i, size in enumerate(outputs) if len(size) == 3), None)
    if None in roles.values() or not kept or scores != len(kept):  # what it changes comes ahead of the logits
        raise ValueError(f"{path} is not understood: {signature}")
    forward, lock = held.load_method("forward"), Lock()

    def call(inputs: list[Any], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        fed, held = iter(inputs), iter(state)
        given = [next(held if role == "state" else fed).contiguous() for role in roles.values()]
        with lock:  # calls share their memory, but for outputs, which are copied
            outputs = forward.execute(given)
        return outputs[scores], list(outputs[:scores])

    return Graph(
        call=call,
        roles=[str(role) for role in roles.values() if role != "state"],
        inputs=[t for name, t in traced.items() if roles[name] != "state"],
        state=[torch.zeros(list(map(int, t.shape)), dtype=t.dtype) for t in kept],
        grows=False,
        b=1,
        s="s",
        ranges={"s": (1, most)},
        last_only=False,
        vmaps=False,
        catches=False,
        vocab_size=int(outputs[scores][-1]),
        device=torch.device("cpu"),
        signature=signature,
    )


INSTEAD = "Compile what exgen.export_for_generation makes, with exgen.compile_for_generation"
