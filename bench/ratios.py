"""How much faster exgen's plain `ExportedProgram` is than transformers, measured in one run.

python bench/ratios.py                          SmolLM2-135M, float32, two threads; about six minutes
python bench/ratios.py --model DIR --only beams greedy
"""

import argparse
import copy
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from measure import THREADS, fastest, long_prompt, memory_taken, say

import exgen

RUNS = 3
Generate = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name (default: SmolLM2-135M-Instruct, as demo.py gets it)")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--memory-of", choices=("eager", "exgen"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None:
        from demo import smollm2

        args.model = str(smollm2())
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    prompt = long_prompt(AutoTokenizer.from_pretrained(args.model), 1024)
    if args.memory_of:
        print(memory_of(args.memory_of, model, prompt))
        return
    say("exporting ...")
    program = exgen.load(exgen.export_for_generation(model))
    for name in args.only:
        MEASUREMENTS[name](args.model, model, program, prompt)


def options(new: int, **more: Any) -> dict[str, Any]:
    """Options under which every engine generates exactly `new` tokens."""
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False} | more


def eager(model: Any, ids: Tensor, **cfg: Any) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), **cfg)


def beams(_: str, model: Any, program: exgen.Program, prompt: Tensor) -> None:
    cfg = options(15, num_beams=6)
    same = torch.equal(exgen.generate(program, prompt, **cfg), eager(model, prompt, **cfg))
    seconds = fastest(
        {"eager": partial(eager, model, prompt, **cfg), "exgen": partial(exgen.generate, program, prompt, **cfg)}, RUNS
    )
    compare("1024-token prompt, 6 beams, 15 new tokens, against eager", seconds["eager"], seconds["exgen"], ">= 4")
    print(f"    same tokens: {same}")


def greedy(_: str, model: Any, program: exgen.Program, prompt: Tensor) -> None:
    prompt = prompt[:, :265]
    cfg = options(32)
    same = torch.equal(exgen.generate(program, prompt, **cfg), eager(model, prompt, **cfg))
    calls = {"eager": partial(eager, model, prompt, **cfg), "exgen": partial(exgen.generate, program, prompt, **cfg)}
    seconds = fastest(calls, RUNS)
    new = 8  # its time is the same for every token, and each takes over a quarter of a second
    say("exporting with transformers' own helper, then generating with it (half a minute or more) ...")
    helper = exported_helper(model, prompt.shape[1] + new)
    tokens = fastest({"helper": partial(helper, prompt, new)}, 1)["helper"] / (prompt.shape[1] + new)
    again = fastest(calls, RUNS)
    seconds = {name: min(seconds[name], again[name]) for name in calls}
    compare("265 + 32 tokens greedy, against eager", seconds["eager"], seconds["exgen"], ">= 0.83")
    whole = tokens * (prompt.shape[1] + 32)
    compare(
        f"the same, against transformers' helper (scaled from {265 + new} tokens)", whole, seconds["exgen"], ">= 20"
    )
    print(f"    same tokens as eager: {same}")


def exported_helper(model: Any, slots: int) -> Callable[[Tensor, int], None]:
    """transformers' `TorchExportableModuleForDecoderOnlyLM.generate`, called with token ids instead of a tokenizer."""
    model = copy.deepcopy(model)  # it changes what it is given
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=slots)
    exported = module.export(torch.ones(1, 1, dtype=torch.int64), cache_position=torch.zeros(1, dtype=torch.int64))

    def generate(ids: Tensor, new: int) -> None:
        tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids, **_: ids)
        stand_in = type("Ids", (SimpleNamespace,), {"__call__": lambda self, *_, **__: SimpleNamespace(input_ids=ids)})
        module.generate(exported, stand_in(**vars(tokenizer)), "", max_new_tokens=new)

    return generate


def memory(path: str, *_: Any) -> None:
    """One process each: memory that one engine freed would hide what the next takes."""
    taken = {}
    for name in ("eager", "exgen"):
        command = [sys.executable, __file__, "--model", path, "--memory-of", name]
        taken[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    print(
        f"peak memory beyond the loaded model, 1024-token prompt, 4 beams, 15 new tokens: "
        f"eager {taken['eager'] / 1e6:.0f} MB, exgen {taken['exgen'] / 1e6:.0f} MB"
    )


def memory_of(name: str, model: Any, prompt: Tensor) -> int:
    generate: Generate = partial(eager, model)
    if name == "exgen":
        generate = partial(exgen.generate, exgen.load(exgen.export_for_generation(model)))
    generate(prompt[:, :8], **options(2))  # what is made once, on the first call, is no part of a call's memory
    return memory_taken(lambda: generate(prompt, **options(15, num_beams=4)))


class At(StoppingCriteria):
    """Stops texts of `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def room(_: str, model: Any, program: exgen.Program, prompt: Tensor) -> None:
    prompt = prompt[:, :265]
    roomy = options(32, max_new_tokens=2000, stopping_criteria=StoppingCriteriaList([At(prompt.shape[1] + 32)]))
    for k in (1, 4):
        seconds = fastest(
            {
                "32": partial(exgen.generate, program, prompt, **options(32, num_beams=k)),
                "2000": partial(exgen.generate, program, prompt, **roomy, num_beams=k),
            },
            RUNS,
        )
        ratio = seconds["2000"] / seconds["32"]
        print(f"32 tokens with room for 2000, {k} beams: {ratio:.3f} x the time with room for 32 (wanted <= 1.1)")


def overhead(_: str, model: Any, program: exgen.Program, prompt: Tensor) -> None:
    for k, wanted in ((1, "1"), (6, "3")):
        moments: list[tuple[float, float]] = []
        timed = program._replace(step=timed_step(program.step, moments))
        gaps = []
        for _ in range(RUNS):
            moments.clear()
            # min_new_tokens would add transformers' processors for it, 0.2 ms each over this vocabulary
            exgen.generate(timed, prompt[:, :265], do_sample=False, max_new_tokens=32, num_beams=k)
            steps = moments[1:]  # the first is the prompt
            gaps.append(sum(start - end for (_, end), (start, _) in pairwise(steps)) / (len(steps) - 1))
        print(f"loop's own time per step, {k} beams: {min(gaps) * 1e3:.2f} ms (wanted < {wanted})")


def timed_step(step: Callable[..., Any], moments: list[tuple[float, float]]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        out = step(*args)
        moments.append((start, time.perf_counter()))
        return out

    return timed


def compare(what: str, theirs: float, ours: float, wanted: str) -> None:
    print(f"{what}: {theirs:.2f} s / {ours:.2f} s = {theirs / ours:.2f} x faster (wanted {wanted})", flush=True)


MEASUREMENTS: dict[str, Callable[..., None]] = {
    "beams": beams,
    "greedy": greedy,
    "memory": memory,
    "room": room,
    "overhead": overhead,
}

if __name__ == "__main__":
    main()
