"""One engine in one process: it loads a model once, then answers requests, one JSON line each.

python bench/workers.py exgen model.pt2
    < {"ids": [1, 2, 3], "new": 16, "beams": 4}
    > {"tokens": [...], "prefill": 0.5, "seconds": 1.2, "memory": 50000000}

`tokens` are the new ones, exactly `new` of them; `prefill` the seconds until the first can be chosen, `seconds` of the
whole request; `memory` the bytes the process grew by at most beyond the loaded model. Engines have environments of
their own, so that nothing but the standard library is imported before the engine is known.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from measure import THREADS, memory_held, memory_peak, reset_memory_peak

Reply = tuple[list[int], float, float]  # new tokens, seconds until the first, seconds
Engine = Callable[[list[int], int, int], Reply]  # (ids, new, beams)


def main() -> None:
    name, *args = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w")  # engines print what they like: theirs goes to stderr
    os.dup2(2, 1)
    engine = ENGINES[name](*args)
    engine(list(range(100, 116)), 3, 1)  # what is made once, on the first call, is no part of a request
    reset_memory_peak()  # what loading has freed is no part of the loaded model
    loaded = memory_held()
    print(json.dumps({"ready": name}), file=answer, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reset_memory_peak()
        try:
            tokens, prefill, seconds = engine(request["ids"], request["new"], request["beams"])
            reply = {"tokens": tokens, "prefill": prefill, "seconds": seconds, "memory": memory_peak() - loaded}
        except Exception as error:  # a peer that cannot do one thing is measured at the others
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=answer, flush=True)


class Clock:
    """A logits processor that changes nothing and notes when the first logits came."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.first = self.first or time.perf_counter()
        return scores


def with_transformers_options(generate: Callable[..., Any]) -> Engine:
    """`generate(input_ids, **cfg)`, eager's or exgen's, as an `Engine`."""
    import torch
    from transformers import LogitsProcessorList

    torch.set_num_threads(THREADS)

    def engine(ids: list[int], new: int, beams: int) -> Reply:
        clock = Clock()
        start = time.perf_counter()
        sequences = generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=new,
            min_new_tokens=new,
            num_beams=beams,
            do_sample=False,
            logits_processor=LogitsProcessorList([clock]),
        )
        end = time.perf_counter()
        return sequences[0, len(ids) :].tolist(), (clock.first or end) - start, end - start

    return engine


def exgen(path: str) -> Engine:
    from functools import partial

    from exgen import generate, load

    return with_transformers_options(partial(generate, load(path)))


def eager(folder: str) -> Engine:
    return with_transformers_options(transformers_model(folder).generate)


def compiled(folder: str) -> Engine:
    """`torch.compile` with a static cache, transformers' own way to be fast. A new shape compiles first, untimed."""
    from functools import partial

    from transformers import CompileConfig

    config = CompileConfig(fullgraph=True, mode="default", dynamic=False)
    config._compile_all_devices = True  # transformers leaves CPUs out otherwise
    model = transformers_model(folder)
    engine = with_transformers_options(partial(model.generate, cache_implementation="static", compile_config=config))
    compiled_for: set[tuple[int, int, int]] = set()

    def compile_first(ids: list[int], new: int, beams: int) -> Reply:
        if (len(ids), new, beams) not in compiled_for:
            model._previous_max_cache_length = (
                -1
            )  # else the cache, and the cost of a step, is that of the longest call so far
            engine(ids, new, beams)
            compiled_for.add((len(ids), new, beams))
        model._previous_max_cache_length = -1
        return engine(ids, new, beams)

    return compile_first


def helper(folder: str) -> Engine:
    """transformers' `TorchExportableModuleForDecoderOnlyLM.generate`, which reads the prompt token by token."""
    from types import SimpleNamespace

    import torch
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    torch.set_num_threads(THREADS)
    model = transformers_model(folder)
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=320)
    exported = module.export(torch.ones(1, 1, dtype=torch.int64), cache_position=torch.zeros(1, dtype=torch.int64))

    class Tokenizer:
        eos_token_id = -1

        def __call__(self, prompt: Any, return_tensors: str) -> Any:
            return SimpleNamespace(input_ids=torch.tensor([prompt]))

        def decode(self, ids: Any, **_: Any) -> list[int]:
            return list(ids.tolist())

    def engine(ids: list[int], new: int, beams: int) -> Reply:
        start = time.perf_counter()
        module.generate(exported, Tokenizer(), ids[:24], max_new_tokens=4)
        each = (time.perf_counter() - start) / (24 + 4)  # a seventh of a second for every token, whatever their number
        return [], each * len(ids), each * (len(ids) + new - 1)

    return engine


def transformers_model(folder: str) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ctranslate2(folder: str) -> Engine:
    import ctranslate2

    generator = ctranslate2.Generator(folder, device="cpu", compute_type="float32", intra_threads=THREADS)
    words = json.loads((Path(folder) / "vocabulary.json").read_text())

    def generate(ids: list[int], new: int, beams: int, **more: Any) -> Reply:
        options = {"max_length": new, "min_length": new, "beam_size": beams, "include_prompt_in_result": False}
        start = time.perf_counter()
        [result] = generator.generate_batch([[words[i] for i in ids]], **options, **more)
        return list(result.sequences_ids[0]), 0.0, time.perf_counter() - start

    def engine(ids: list[int], new: int, beams: int) -> Reply:
        if beams == 1:
            moments: list[float] = []
            start = time.perf_counter()
            tokens, _, seconds = generate(ids, new, 1, callback=lambda _: moments.append(time.perf_counter()))
            return tokens, moments[0] - start, seconds
        # It says nothing between the steps of a beam search: one new token is timed apart.
        before = generate(ids, 1, beams)[2]
        tokens, _, seconds = generate(ids, new, beams)
        return tokens, min(before, generate(ids, 1, beams)[2]), seconds

    return engine


def llamacpp(path: str) -> Engine:
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    log = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(log, None)
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def engine(ids: list[int], new: int, beams: int) -> Reply:
        if beams > 1:
            raise NotImplementedError("llama.cpp has no beam search any more")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch = len(ids) + new, len(ids)
        params.n_threads = params.n_threads_batch = THREADS
        context = lib.llama_init_from_model(model, params)

        def feed(tokens: list[int]) -> int:
            held = (lib.llama_token * len(tokens))(*tokens)
            if lib.llama_decode(context, lib.llama_batch_get_one(held, len(tokens))):
                raise RuntimeError("llama_decode failed")
            return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (vocab,)).argmax())

        start = time.perf_counter()
        tokens = [feed(ids)]
        prefill = time.perf_counter() - start
        while len(tokens) < new:
            tokens.append(feed(tokens[-1:]))
        seconds = time.perf_counter() - start
        lib.llama_free(context)
        return tokens, prefill, seconds

    engine.keep = log  # type: ignore[attr-defined]  # the library holds a bare pointer to it
    return engine


def onnxruntime(folder: str) -> Engine:
    import onnxruntime_genai as og

    model = og.Model(folder)

    def engine(ids: list[int], new: int, beams: int) -> Reply:
        length = len(ids) + new
        params = og.GeneratorParams(model)
        params.set_search_options(
            max_length=length, min_length=length, num_beams=beams, do_sample=False, past_present_share_buffer=beams == 1
        )
        start = time.perf_counter()
        generator = og.Generator(model, params)
        generator.append_tokens([ids])
        prefill = time.perf_counter() - start
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return [int(i) for i in generator.get_sequence(0)[len(ids) :]], prefill, seconds

    return engine


ENGINES: dict[str, Callable[..., Engine]] = {
    "exgen": exgen,
    "eager": eager,
    "compile": compiled,
    "helper": helper,
    "ctranslate2": ctranslate2,
    "llamacpp": llamacpp,
    "onnxruntime": onnxruntime,
}

if __name__ == "__main__":
    main()
