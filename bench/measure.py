"""What every benchmark needs: a long prompt, interleaved timing, memory a call takes.

ids = long_prompt(tokenizer, 1024)                                          # [1, 1024]
seconds = fastest({"eager": lambda: ..., "exgen": lambda: ...}, runs=3)     # the least of three interleaved runs each
"""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import files
from pathlib import Path
from typing import Any

THREADS = 2


def long_prompt(tokenizer: Any, tokens: int) -> Any:
    """`[1, tokens]` int64: transformers' own licence, a text on every machine that runs this, repeated."""
    licence = next(file for file in files("transformers") or [] if file.name == "LICENSE")
    text = licence.read_text() * (1 + tokens // 2000)
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


def fastest(calls: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Each call's least seconds. The calls take turns, as this kind of machine drifts by a fifth within minutes."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(runs):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def memory_taken(call: Callable[[], object]) -> int:
    """Bytes by which the process grows at most while `call` runs."""
    reset_memory_peak()
    before = memory_held()
    call()
    return memory_peak() - before


def reset_memory_peak() -> None:
    """The peak becomes what is resident now. Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def memory_held() -> int:
    return _status("VmRSS")


def memory_peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def read_bandwidth() -> float:
    """Bytes per second at which both threads read memory: the sum of a gigabyte, far beyond any cache."""
    import torch

    torch.set_num_threads(THREADS)
    block = torch.ones(2**28)
    return block.nbytes / fastest({"sum": block.sum}, 5)["sum"]


def gemm_rate() -> float:
    """Floating-point operations per second of a large float32 matrix product."""
    import torch

    torch.set_num_threads(THREADS)
    n = 2048
    a, b = torch.rand(n, n), torch.rand(n, n)
    return 2 * n**3 / fastest({"mm": lambda: a @ b}, 4)["mm"]


def say(text: str) -> None:
    print(text, flush=True, file=sys.stderr)
