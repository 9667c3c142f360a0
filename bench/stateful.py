"""How much one vectorised call of a stateful one-row program saves over a call for each beam.

python bench/stateful.py folder-of-a-model                                  # prints the ratio per step, in one run
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from exgen import Program, load

BEAMS, PROMPT, SLOTS, RUNS = 4, 256, 320, 12


def stateful(folder: str) -> Program:
    """A program of transformers' own recipe: one row, its cache in buffers, one token in a call."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.cache_implementation = "static"
    recipe = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=SLOTS)
    return load(
        recipe.export(input_ids=torch.zeros(1, 1, dtype=torch.long), cache_position=torch.zeros(1, dtype=torch.long))
    )


@torch.no_grad()
def step(program: Program, tensors: list[Tensor], rows: int) -> None:
    positions = torch.full((rows, 1), PROMPT)
    visible = (torch.arange(SLOTS) <= PROMPT).expand(rows, 1, -1)
    tokens, first = torch.full((rows, 1), 5), torch.zeros(1, dtype=torch.long)
    program.step(tokens, positions, positions, visible, first, positions, tensors)


def main(folder: str) -> None:
    program = stateful(folder)
    together, alone = program.empty(BEAMS, SLOTS), program.empty(1, SLOTS)
    seconds: dict[str, list[float]] = {"one call": [], "a call for each beam": []}
    for _ in range(RUNS + 2):
        start = time.perf_counter()
        step(program, together, BEAMS)
        middle = time.perf_counter()
        for _ in range(BEAMS):
            step(program, alone, 1)
        seconds["one call"].append(middle - start)
        seconds["a call for each beam"].append(time.perf_counter() - middle)
    best = {name: min(times[2:]) for name, times in seconds.items()}
    for name, fastest in best.items():
        print(f"{BEAMS} beams, {name}: {fastest * 1000:.1f} ms")
    print(f"ratio {best['a call for each beam'] / best['one call']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
