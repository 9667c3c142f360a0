"""A step program as an ExecuTorch file: XNNPACK computes what it can, ExecuTorch's own kernels the rest.

    python -m examples.executorch model.pt2 model.pte --tokens 64 --slots 1024 --rows 4

ExecuTorch plans its memory ahead, so the sizes of a call need upper bounds. The metadata goes along as text that the
constant method `exgen` returns. The caches that the program mutates come back as outputs, ahead of the logits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram


def lower(exported: ExportedProgram, path: str | Path, tokens: int = 64, slots: int = 1024, rows: int = 4) -> Path:
    """Write what `export_for_generation` made to `path`: at most `tokens` of each of `rows` in a call, and `slots`.

    More rows run in several calls, and longer prompts are read in as many as they need.
    """
    from executorch.backends.xnnpack.partition import xnnpack_partitioner  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower  # type: ignore[import-not-found, import-untyped, unused-ignore]

    text = exported.graph_module.meta.get("custom", {}).get("exgen")
    if text is None:
        raise ValueError("this program is no step program: make one with exgen.export_for_generation")
    metadata = json.loads(text)
    if metadata.get("states"):
        raise ValueError("programs with states other than keys and values cannot be lowered yet")
    if min(tokens, slots) < 3 or rows < 1:
        raise ValueError(f"at most {tokens} tokens, {slots} slots, {rows} rows: give at least 3, 3 and 1")
    with torch.no_grad():
        bounded = retraced(exported, metadata, tokens, slots, rows)
    edge = to_edge_transform_and_lower(
        bounded,
        partitioner=[xnnpack_partitioner.XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),  # not all of its operations are core ATen's
        constant_methods={"exgen": json.dumps(metadata | {"most": {"tokens": tokens, "slots": slots, "rows": rows}})},
    )
    Path(path).write_bytes(edge.to_executorch().buffer)
    return Path(path)


def retraced(
    exported: ExportedProgram, metadata: dict[str, Any], tokens: int, slots: int, rows: int
) -> ExportedProgram:
    """`exported` with upper bounds for its sizes."""
    module = exported.module(check_guards=False)
    for node in module.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
            node.target = contiguous_view  # lowered attention answers in another layout, which has no such view
    module.recompile()
    b, s, l, m, n = (min(rows, 2), 3, slots, slots - 1, 2)
    dtype = getattr(torch, metadata["dtype"])
    ids = [torch.zeros(b, s, dtype=torch.long) for _ in range(3)]
    visible = torch.ones(b, s, m, dtype=torch.bool)
    keys, values = ([torch.zeros(b, h, l, d, dtype=dtype) for h, d in metadata[name]] for name in ("keys", "values"))
    positions = torch.zeros(b, l, dtype=torch.long)
    arguments = (*ids, visible, torch.zeros(n, dtype=torch.long), positions, keys, values)
    by = {
        "b": Dim.STATIC if rows == 1 else Dim("b", min=1, max=rows),
        "s": Dim("s", min=1, max=tokens),
        "l": Dim("l", min=1, max=slots),
        "m": Dim("m", min=1, max=slots),
        "n": Dim("n", min=1, max=tokens),
    }
    token, layer = {0: by["b"], 1: by["s"]}, {0: by["b"], 2: by["l"]}
    seen, held = {0: by["b"], 1: by["s"], 2: by["m"]}, {0: by["b"], 1: by["l"]}
    sizes = (token, token, token, seen, {0: by["n"]}, held, [layer] * len(keys), [layer] * len(values))
    return torch.export.export(module, arguments, dynamic_shapes=sizes, strict=False)


def contiguous_view(x: Tensor, shape: list[int]) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(shape)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="lower a step program for ExecuTorch")
    parser.add_argument("exported", help="a file of torch.export.save(export_for_generation(model), ...)")
    parser.add_argument("path", help="the .pte to write")
    for name, default in {"tokens": 64, "slots": 1024, "rows": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"most {name} of a call ({default})")
    options = vars(parser.parse_args())
    print(lower(torch.export.load(options.pop("exported")), **options))
