"""A step program gives its model's own logits, however its rows, slots and beams are laid out."""

import copy
import json
import subprocess
import sys
from functools import cache

import pytest
import torch
import transformers
from tiny import CONFIGS, VOCAB, tiny
from torch import Tensor
from torch.export import ExportedProgram
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import export
from export import export_for_generation

COMMON = {"vocab_size": VOCAB, "pad_token_id": 97, "bos_token_id": 96, "eos_token_id": 98, "initializer_range": 0.15}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 192}
GROUPED = {**COMMON, **SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
GPT = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 192}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, tuple[str, dict]] = {
    "gemma2_capped": ("gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 1.0}),
    "gpt_oss": (
        "gpt_oss",
        {
            **GROUPED,
            **EXPERTS,
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "bloom": ("bloom", {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", {**COMMON, **SIZES, "multi_query": True}),
    "falcon_alibi": ("falcon", {**COMMON, **SIZES, "multi_query": False, "alibi": True}),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 7}),
    "llama4": (
        "llama4_text",
        {**GROUPED, **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 7}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "mixtral": ("mixtral", {**GROUPED, **EXPERTS}),
    "qwen3_moe": (
        "qwen3_moe",
        {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "deepseek_v3": (  # keys and values of different head sizes
        "deepseek_v3",
        {**GROUPED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"v_head_dim": 4, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 2},
    ),
}
# 4.57 runs experts in a loop over those that some token chose, which no graph can hold.
UNTRACEABLE = {"gpt_oss", "mixtral", "qwen3_moe"} if transformers.__version__.startswith("4.") else set()
NAMES = [*CONFIGS, *(name for name in MORE if name not in UNTRACEABLE)]
WINDOWS = {
    "gemma2": [7, None],
    "gemma2_capped": [7, None],
    "gemma3": [7, None],
    "gpt_oss": [7, None],
    "mistral": [7, 7],
    "phi3": [7, 7],
    "llama4": [7, None],
}


def small(name: str, **changes: object) -> PreTrainedModel:
    if name in CONFIGS and not changes:
        return tiny(name)
    kind, settings = MORE.get(name, (name, {}))
    config: PretrainedConfig = AutoConfig.for_model(kind, **{**settings, **changes})
    torch.manual_seed(0)
    # sdpa of 4.57 leaves softcap out
    attention = {"attn_implementation": "eager"} if name == "gemma2_capped" else {}
    model = AutoModelForCausalLM.from_config(config, **attention).eval()
    for parameter in model.parameters():  # experts, sinks and biases may come uninitialised, or all zero
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    return model


@cache
def exported(name: str) -> tuple[PreTrainedModel, ExportedProgram]:
    model = small(name)
    return model, export_for_generation(model)


def metadata(program: ExportedProgram) -> dict:
    return json.loads(program.graph_module.meta["custom"]["exgen"])


class Session:
    """A program, its cache, and which columns of it are filled with what."""

    def __init__(self, program: ExportedProgram, b: int, l: int) -> None:
        about = metadata(program)
        self.step = program.module()
        self.slot_positions = torch.zeros(b, l, dtype=torch.long)
        dtype = getattr(torch, about["dtype"])
        self.keys = [torch.zeros(b, h, l, d, dtype=dtype) for h, d in about["keys"]]
        self.values = [torch.zeros(b, h, l, d, dtype=dtype) for h, d in about["values"]]

    def feed(self, ids: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, at: list[int]) -> Tensor:
        cache = (self.slot_positions, self.keys, self.values)
        return self.step(ids, positions, slots, visible, torch.tensor(at), *cache)


def eager(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [t, v] of one text, read alone and at once."""
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0]


def left_padded(lengths: list[int], total: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [b, t], positions [b, t], and sees [b, t, t]: which columns each column may attend to."""
    ids = torch.randint(0, 90, (len(lengths), total), generator=torch.Generator().manual_seed(1))
    columns, starts = torch.arange(total), total - torch.tensor(lengths)[:, None]
    sees = (columns <= columns[:, None]) & (columns >= starts[:, None])
    return ids, (columns - starts).clamp(min=0), sees | torch.eye(total, dtype=torch.bool)


@pytest.mark.parametrize("name", NAMES)
def test_a_left_padded_batch_prefilled_and_decoded_equals_each_row_alone(name: str) -> None:
    model, program = exported(name)
    lengths, prompt, total, l = [24, 16, 7], 20, 24, 29
    ids, positions, sees = left_padded(lengths, total)
    visible = torch.zeros(3, total, l, dtype=torch.bool)
    visible[:, :, :total] = sees
    slots = torch.arange(total).repeat(3, 1)
    session, answers = Session(program, 3, l), []
    for start, stop in [(0, prompt), *((column, column + 1) for column in range(prompt, total))]:
        part = slice(start, stop)
        at = list(range(stop - start))
        answers.append(session.feed(ids[:, part], positions[:, part], slots[:, part], visible[:, part], at))
    answer = torch.cat(answers, dim=1)
    for row, length in enumerate(lengths):
        wanted = eager(model, ids[row, total - length :])
        torch.testing.assert_close(answer[row, total - length :], wanted, rtol=0, atol=1e-4)
    assert session.slot_positions[:, :total].equal(positions)


@pytest.mark.parametrize("name", NAMES)
def test_beams_that_share_a_row_see_the_prompt_and_their_own_ancestors(name: str) -> None:
    model, program = exported(name)
    lengths, prompt, k, steps = [18, 11], 18, 3, 4
    l = prompt + k * steps
    order = torch.randperm(l, generator=torch.Generator().manual_seed(3))  # slots need not be in order
    ids, positions, sees = left_padded(lengths, prompt)
    visible = torch.zeros(2, prompt, l, dtype=torch.bool)
    visible[:, :, order[:prompt]] = sees
    session = Session(program, 2, l)
    session.feed(ids, positions, order[:prompt].repeat(2, 1), visible, [prompt - 1])
    generator = torch.Generator().manual_seed(2)
    beams = [[ids[row, prompt - length :] for _ in range(k)] for row, length in enumerate(lengths)]
    seen = visible[:, -1:].repeat(1, k, 1)  # [b, k, l]
    for step in range(steps):
        parents = torch.randint(0, k, (2, k), generator=generator)
        tokens = torch.randint(0, 90, (2, k), generator=generator)
        own = order[prompt + step * k : prompt + (step + 1) * k]
        seen = seen.gather(1, parents[:, :, None].expand(-1, -1, l))
        seen[:, torch.arange(k), own] = True
        beams = [[torch.cat([beams[r][parents[r, j]], tokens[r, j, None]]) for j in range(k)] for r in range(2)]
        at = torch.tensor(lengths)[:, None].repeat(1, k) + step
        answer = session.feed(tokens, at, own.repeat(2, 1), seen, list(range(k)))
        wanted = torch.stack([torch.stack([eager(model, beam)[-1] for beam in row]) for row in beams])
        torch.testing.assert_close(answer, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "kind, settings", [("llama", {**GROUPED, "max_position_embeddings": 1024}), ("gpt2", {**GPT, "n_positions": 1024})]
)
def test_one_export_runs_at_any_size(kind: str, settings: dict) -> None:
    model = small(kind, **settings)
    program = export_for_generation(model)
    for b, s, m, l, n in [
        (1, 1, 1, 1, 1),
        (5, 1, 3, 3, 1),
        (5, 1, 3, 9, 1),
        (1, 2, 2, 2, 2),
        (2, 700, 700, 701, 1),
        (1, 700, 733, 733, 700),
        (11, 11, 11, 11, 11),
        (1, 13, 13, 1000, 3),
    ]:
        ids, positions, sees = left_padded([s] * b, s)
        visible = torch.zeros(b, s, m, dtype=torch.bool)
        visible[:, :, :s] = sees
        at = list(range(s - n, s))
        answer = Session(program, b, l).feed(ids, positions, torch.arange(s).repeat(b, 1), visible, at)
        with torch.no_grad():
            torch.testing.assert_close(answer, model(ids).logits[:, at], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_bfloat16_model_stays_bfloat16(name: str) -> None:
    model = copy.deepcopy(small(name)).to(torch.bfloat16)
    program = export_for_generation(model)
    assert metadata(program)["dtype"] == "bfloat16"
    ids, positions, sees = left_padded([12, 12], 12)
    answer = Session(program, 2, 12).feed(ids, positions, torch.arange(12).repeat(2, 1), sees, list(range(12)))
    wanted = torch.stack([eager(model, row) for row in ids])
    assert answer.dtype == torch.bfloat16
    assert (answer - wanted).float().norm() < 0.05 * wanted.float().norm()


@pytest.mark.parametrize("name", NAMES)
def test_metadata_tells_what_a_caller_must_allocate(name: str) -> None:
    model, program = exported(name)
    about = metadata(program)
    fields = "format keys values states dtype vocab_size max_positions windows generation_config model_type"
    assert list(about) == fields.split()
    assert (about["format"], about["dtype"], about["vocab_size"]) == (2, "float32", VOCAB)
    assert about["windows"] == WINDOWS.get(name, [None, None])
    assert about["max_positions"] == (None if name == "bloom" else 192)
    assert about["model_type"] == model.config.model_type
    assert about["generation_config"]["eos_token_id"] == 98
    if name == "llama":
        assert about["keys"] == about["values"] == [[2, 16], [2, 16]]
    if name == "deepseek_v3":
        assert all(key[1] != value[1] for key, value in zip(about["keys"], about["values"], strict=True))


def test_a_saved_program_runs_without_transformers(tmp_path: object) -> None:
    model, program = exported("gemma3")
    path = f"{tmp_path}/model.pt2"
    torch.export.save(program, path)
    ids = torch.arange(5, 25)
    code = f"""
import json, sys, torch
program = torch.export.load({path!r})
about = json.loads(program.graph_module.meta["custom"]["exgen"])
t = 20
keys, values = ([torch.zeros(1, h, t, d) for h, d in about[name]] for name in ("keys", "values"))
row = torch.arange(t)[None]
visible, at = torch.ones(1, t, t, dtype=torch.bool).tril(), torch.tensor([t - 1])
logits = program.module()(row + 5, row, row.clone(), visible, at, torch.zeros_like(row), keys, values)
assert not [name for name in sys.modules if name.startswith("transformers")]
torch.save(logits, {path!r} + ".logits")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    torch.testing.assert_close(torch.load(f"{path}.logits")[0, 0], eager(model, ids)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    if fails:
        monkeypatch.setattr(export, "simplified", broken)
    model = small("gemma2")
    model.train()
    model.lm_head.eval()
    model.lm_head.weight.requires_grad_(False)
    model.config.use_cache = False
    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)

    def state() -> object:
        return (
            {name: (module.training, set(vars(module))) for name, module in model.named_modules()},
            {name: (id(weight), weight.requires_grad, weight.grad) for name, weight in model.named_parameters()},
            {name: value.clone() for name, value in model.state_dict().items()}.keys(),
            copy.deepcopy(vars(model.config)),
            model.generation_config.to_dict(),
            [dict(interface._global_mapping) for interface in interfaces],
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
            torch.autocast,
        )

    before, weights = state(), copy.deepcopy(model.state_dict())
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            export_for_generation(model)
    else:
        export_for_generation(model)
    assert state() == before
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())


def test_a_program_asks_for_no_gradients_and_shares_the_weights() -> None:
    model, program = exported("llama")
    assert all(weight.requires_grad for weight in model.parameters())
    assert not any(weight.requires_grad for weight in program.state_dict.values())
    assert program.state_dict["model.lm_head.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    ids, positions, sees = left_padded([4], 4)
    session = Session(program, 1, 4)
    assert not session.feed(ids, positions, torch.arange(4)[None], sees, [3]).requires_grad
    assert not session.keys[0].requires_grad


def test_the_graph_neither_copies_the_cache_nor_checks_anything() -> None:
    _, program = exported("llama")
    aten = torch.ops.aten
    attentions = [node for node in program.graph.nodes if node.target == aten.scaled_dot_product_attention.default]
    assert len(attentions) == 2
    for node in attentions:  # a view of what is in use, straight from the writes into the cache
        assert [source.target for source in node.args[1:3]] == [aten.narrow.default] * 2
        assert [source.args[0].target for source in node.args[1:3]] == [aten.index_put_.default] * 2
    masks = {node.args[3] for node in attentions}
    assert len(masks) == 1
    names = " ".join(str(node.target) for node in program.graph.nodes)
    assert not any(word in names for word in ("scatter", "assert", "dropout", "wrap_with"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
def test_the_end_of_the_last_layer_is_computed_for_the_tokens_asked_for(name: str) -> None:
    _, program = exported(name)
    val = {node.name: node.meta.get("val") for node in program.graph.nodes}
    fed, asked = str(val["input_ids"].shape[1]), str(val["logits_at"].shape[0])
    sizes = [str(n.meta["val"].shape[1]) for n in program.graph.nodes if n.target == torch.ops.aten.linear.default]
    assert sizes == [fed] * 10 + [asked] * 5


@pytest.mark.parametrize(
    "kind, settings, message",
    [
        (
            "gpt_neo",
            {**COMMON, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
            | {"window_size": 8, "attention_types": [[["local"], 2]]},
            "window_size is 8",
        ),
        ("rwkv", {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 64}, "states"),
        *((*MORE[name], "cannot trace") for name in sorted(UNTRACEABLE)),
    ],
)
def test_a_model_that_cannot_be_right_is_refused(kind: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_for_generation(small(kind, **settings))


def test_what_is_no_decoder_is_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    for given in (transformers.AutoModelForSeq2SeqLM.from_config(config), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="decoder-only"):
            export_for_generation(given)
