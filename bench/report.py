"""docs/benchmarks.md and its plots, from what `peers.py` measured."""

from pathlib import Path
from typing import Any

COLOURS = {
    "exgen compiled": "#c0392b",
    "exgen exported": "#e67e22",
    "exgen int8": "#f4b6a6",
    "llama.cpp": "#2c7fb8",
    "CTranslate2": "#41ab5d",
    "onnxruntime-genai": "#756bb1",
    "transformers eager": "#636363",
    "transformers compile": "#969696",
    "transformers helper": "#bdbdbd",
}
OURS = ("exgen compiled", "exgen exported")
NOTES = {
    "llama.cpp": "its cache is float16, as it comes; it has no beam search",
    "transformers helper": "reads prompts token by token; timed over 24 + 4 tokens and scaled",
    "transformers compile": "a compiled step with a static cache; each prompt length compiles anew, untimed",
    "onnxruntime-genai": "its float32 CPU export",
    "CTranslate2": "float32",
    "exgen int8": "weight-only int8 by torchao, compiled; another model's tokens, so not compared",
}


PROMPTS = {265: "265 32 1", 1024: "1024 16 1", 4096: "4096 16 1"}  # tokens: the shape measured
BEAMS = {k: f"1024 16 {k}" for k in (1, 2, 4, 6)}


# Of Inductor's kernel profile, over 4 of the 30 layers and scaled, on the machine of the first run.
PROFILE = """## Where the time goes

Reading 1,024 tokens, compiled, is 1.45 s in two chunks: 1.1 s are products with weights, at 196 GFLOP/s of the 200 to
215 that oneDNN reaches on this processor; 0.31 s is attention, by torch's flash kernel at 130 GFLOP/s, in four pieces
of a chunk's tokens, as it also computes what the mask hides (0.40 s in one piece); 0.05 s is all else, a mask for each
chunk and norms. The end of the last layer is computed for the asked token alone, which is 3% less. A step of 6 beams
after it takes 30 to 33 ms: 15 to 16 for reading the weights, 9 for attention, 5 to 8 for the sums of six tokens, which
overlap with reading only in part.

Tried, and slower or no faster: chunks of 256, 384 or 1,024 tokens; more than two rows of weights at a time; Inductor's
C++ templates (quicker for one token, 1.6 times slower to read a prompt, and the weights twice); huge pages for keys and
values; for one token, attention to each half of the slots in a thread of its own (1 ms less, and a pass more to join
them), or as Inductor's loops (20% less, but more for several beams).
"""


def write_report(results: dict[str, Any], docs: Path) -> None:
    docs.mkdir(exist_ok=True)
    plot(results, docs)
    (docs / "benchmarks.md").write_text(document(results))


def document(results: dict[str, Any]) -> str:
    machine, peers, weights = results["machine"], results["peers"], results["weights"]
    limit = weights / machine["bandwidth"]
    arithmetic = 1024 * weights / 2 / machine["gemm"]  # two operations for each weight of four bytes
    return f"""# Benchmarks

Written by `make bench`. SmolLM2-135M-Instruct, the same float32 weights in every engine, two threads.
Machine: {machine["processor"]}.
The engines took turns for {results["minutes"]:.0f} minutes; each number is of the fastest of an engine's runs.

In the same run, it reads memory at {machine["bandwidth"] / 1e9:.1f} GB/s and multiplies float32 matrices at
{machine["gemm"] / 1e9:.0f} GFLOP/s. A step reads {weights / 1e6:.0f} MB of weights:
**{limit * 1e3:.1f} ms** at that rate.
A prompt of 1,024 tokens is {arithmetic:.2f} s of arithmetic.

## Milliseconds per token, after a prompt of

{table(PROMPTS, "tokens", peers, "step", 1e3, 1)}

![time per token against prompt length](time-per-token-by-prompt.png)

## Seconds to read a prompt of

{table(PROMPTS, "tokens", peers, "prefill", 1, 2)}

## Milliseconds per step of all beams, after 1,024 tokens

{table(BEAMS, "beams", peers, "step", 1e3, 1)}

![time per step against beams](time-per-step-by-beams.png)

## Seconds for 1,024 + 16 tokens with beams, prompt included

{table(BEAMS, "beams", peers, "seconds", 1, 2)}

## Megabytes beyond the loaded model, 1,024 + 16 tokens with beams

{table(BEAMS, "beams", peers, "memory", 1e-6, 0)}

![memory against beams](memory-by-beams.png)

## Targets

{targets(results, limit)}

{PROFILE}
## Same tokens

{agreement(peers)}

## The engines

{chr(10).join(f"- {name}: {NOTES[name]}." for name in peers if name in NOTES)}
"""


def table(shapes: dict[int, str], unit: str, peers: dict[str, Any], field: str, scale: float, digits: int) -> str:
    """Markdown: a line for each peer, a column for each shape; the least of each column in bold."""
    rows = {name: [get(peer, shape, field) for shape in shapes.values()] for name, peer in peers.items()}
    least = [
        min((value for value in column if value is not None), default=None)
        for column in zip(*rows.values(), strict=True)
    ]
    titles = [f"{number:,}" for number in shapes]
    lines = [f"| {unit} | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for name, row in rows.items():
        cells = ["" if value is None else f"{value * scale:.{digits}f}" for value in row]
        cells = [
            f"**{c}**" if value is not None and value == best else c
            for c, value, best in zip(cells, row, least, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(line for line in lines if line.strip("| ") not in rows)  # a peer with nothing to show has no line


def get(peer: dict[str, Any], shape: str, field: str) -> float | None:
    return peer.get(shape, {}).get(field)


def targets(results: dict[str, Any], limit: float) -> str:
    """What exgen is to reach, by its fastest program that was measured."""
    peers = results["peers"]
    name = next((name for name in OURS if name in peers), None)
    if name is None:
        return "exgen was not measured."
    ours, eager, ct2 = peers[name], peers.get("transformers eager", {}), peers.get("CTranslate2", {})
    step = get(ours, "265 32 1", "step")
    others = [peer for other, peer in peers.items() if not other.startswith("exgen")]
    prefill = {
        shape: min((p[shape]["prefill"] for p in others if "prefill" in p.get(shape, {})), default=None)
        for shape in PROMPTS.values()
    }
    six = get(ours, "1024 16 6", "seconds")
    rows = [
        (
            "a token after 265 / llama.cpp's",
            ratio(step, get(peers.get("llama.cpp", {}), "265 32 1", "step")),
            "at most 1.15",
        ),
        ("a token after 265 / weights read once", ratio(step, limit), "at most 1.3"),
        ("eager's token after 265 / ours", ratio(get(eager, "265 32 1", "step"), step), "at least 2.5"),
        ("eager's 6 beams after 1,024 / ours", ratio(get(eager, "1024 16 6", "seconds"), six), "at least 7"),
        ("CTranslate2's 6 beams after 1,024 / ours", ratio(get(ct2, "1024 16 6", "seconds"), six), "at least 1.7"),
        (
            "a 4-beam step after 4,096 / a 1-beam step",
            ratio(get(ours, "4096 16 4", "step"), get(ours, "4096 16 1", "step")),
            "at most 2",
        ),
    ]
    rows += [
        (
            f"reading {shape.split()[0]} tokens / the fastest peer's",
            ratio(get(ours, shape, "prefill"), least),
            "at most 1.05",
        )
        for shape, least in prefill.items()
    ]
    int8 = get(peers.get("exgen int8", {}), "265 32 1", "step")
    rows.append(("our float32 token after 265 / our int8's", ratio(step, int8), "at least 1.8"))
    rows.append(("slots' memory of 16 samples / as many texts' own and one prompt", results["samples"], "at most 1.3"))
    lines = [f"| {what} | {'-' if r is None else f'{r:.2f}'} | {wanted} |" for what, r, wanted in rows]
    return "\n".join([f"| {name} | measured | wanted |", "| --- | ---: | ---: |", *lines])


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def agreement(peers: dict[str, Any]) -> str:
    """Greedy tokens against eager's, by prompt; beams too, where an engine searches as transformers does."""
    lines = []
    for name, peer in peers.items():
        if name in ("transformers eager", "transformers helper", "exgen int8"):
            continue
        for shape, reply in peer.items():
            theirs = peers.get("transformers eager", {}).get(shape, {}).get("tokens")
            if theirs and "tokens" in reply and reply["tokens"] != theirs:
                first = next(i for i, (a, b) in enumerate(zip(reply["tokens"], theirs, strict=False)) if a != b)
                prompt, _, beams = shape.split()
                lines.append(f"- {name}, {prompt} tokens, {beams} beams: differs from eager at new token {first + 1}.")
    return "\n".join(lines) or "Every engine gave eager's tokens for every prompt and number of beams."


def plot(results: dict[str, Any], docs: Path) -> None:
    peers = {name: peer for name, peer in results["peers"].items() if name != "transformers helper"}  # off every scale
    limit = results["weights"] / results["machine"]["bandwidth"] * 1e3
    for name, shapes, x, field, scale, y, line in (
        ("time-per-token-by-prompt", PROMPTS, "prompt tokens", "step", 1e3, "ms per token", limit),
        ("time-per-step-by-beams", BEAMS, "beams, after 1,024 tokens", "step", 1e3, "ms per step of all beams", limit),
        ("memory-by-beams", BEAMS, "beams, 1,024 + 16 tokens", "memory", 1e-6, "MB beyond the loaded model", None),
    ):
        lines = {
            peer: [(number, get(values, shape, field)) for number, shape in shapes.items()]
            for peer, values in peers.items()
        }
        draw(docs / f"{name}.png", lines, scale, x, y, tuple(shapes), line)


def draw(
    path: Path,
    lines: dict[str, list[tuple[int, float | None]]],
    scale: float,
    x: str,
    y: str,
    ticks: tuple[int, ...],
    limit: float | None,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, points in lines.items():
        known = [(a, b * scale) for a, b in points if b is not None]
        if known:
            style: dict[str, Any] = {"linewidth": 2.4 if name.startswith("exgen") else 1.4, "color": COLOURS.get(name)}
            axes.plot(*zip(*known, strict=True), marker="o", markersize=4, label=name, **style)
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="weight bytes / memory bandwidth")
    if max(ticks) > 100:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)
