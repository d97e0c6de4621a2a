"""Guards GGUF export: independent readers find the weights, numbers, ids and stops of the model, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tiny_folder import write_tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_data import ChatRenderer, Tokenizer
from gym_sdk.errors import ModelError, OutputInUse
from gym_serve.models import resolve
from gym_serve.models.gguf import convert
from gym_trainer.exporting.folder import Base
from gym_trainer.exporting.gguf.vocabulary import vocabulary_metadata
from gym_trainer.exporting.gguf.write import write_gguf
from gym_trainer.exporting.ollama import go_template, surroundings_of, write_modelfile
from gym_trainer.exporting.probe import probe_ids, probe_logits, relative_distance
from gym_trainer.matrix.architectures import Architecture
from gym_trainer.matrix.tiny import write_tiny_model

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
READ_BY_TRANSFORMERS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"]
READ_BY_GYM = ["llama", "mistral", "qwen2", "qwen3"]


# What transformers' reader takes for granted: it reads no window for phi3, and no head size for qwen3 and gemma.
# Readers of the llama architecture have no window at all.
VALUES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 128},
    "phi3": {"sliding_window": 128},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
}


def tiny_base(model_type: str, folder: Path) -> Base:
    architecture = Architecture(model_type=model_type, class_name=FAMILIES[model_type], group="decoder")
    return Base.of(resolve(str(write_tiny_model(architecture, folder, **VALUES.get(model_type, {})))))


def logits(folder: Path, base: Base, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return probe_logits(model, probe_ids(base))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_written_and_what_transformers_reads_back_says_the_same(
    model_type: str, tmp_path: Path
) -> None:
    base = tiny_base(model_type, tmp_path / "base")
    expected = logits(base.resolved.folder, base)
    bounds = {"f32": 1e-5, "f16": 2e-3, "q8_0": 5e-2}
    for quant, bound in bounds.items():
        written = write_gguf(base.resolved.folder, tmp_path / f"{quant}.gguf", base, quant=quant, name="tiny")
        assert written.largest_error <= 2.0**-6
        if model_type in READ_BY_TRANSFORMERS:
            assert relative_distance(expected, logits(tmp_path, base, gguf_file=f"{quant}.gguf")) < bound
    reader = GGUFReader(tmp_path / "q8_0.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"
    assert reader.fields["general.file_type"].contents() == 7


@pytest.mark.parametrize("model_type", READ_BY_GYM)
def test_what_gym_converts_back_is_the_model_bit_for_bit_with_the_same_ids(model_type: str, tmp_path: Path) -> None:
    base = tiny_base(model_type, tmp_path / "base")
    write_gguf(base.resolved.folder, tmp_path / "tiny.gguf", base, quant="f32", name="tiny")
    back = tmp_path / "back"
    back.mkdir()
    convert(tmp_path / "tiny.gguf", back, lambda *args: None)
    assert torch.equal(logits(base.resolved.folder, base), logits(back, base))
    text = "3 lions at 06:45; ¿qué más?\n\n数を"
    assert Tokenizer.from_folder(back).encode(text) == base.tokenizer.encode(text)
    assert Tokenizer.from_folder(back).chat_template == base.tokenizer.chat_template
    assert ChatRenderer(Tokenizer.from_folder(back)).stop_ids == base.renderer.stop_ids


def test_llama_3_rotary_factors_survive(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    folder = write_tiny_folder(tmp_path / "base", rope_parameters=scaling, max_position_embeddings=16384)
    base = Base.of(resolve(str(folder)))
    write_gguf(folder, tmp_path / "tiny.gguf", base, quant="f32", name="tiny")
    back = tmp_path / "back"
    back.mkdir()
    convert(tmp_path / "tiny.gguf", back, lambda *args: None)
    assert torch.equal(logits(folder, base), logits(back, base))


def test_smollm2_goes_out_with_the_tokenizer_that_it_came_with(smollm2_folder: Path) -> None:
    base = Base.of(resolve(str(smollm2_folder)))
    found = vocabulary_metadata(base.tokenizer, list(base.renderer.stop_ids), 49152)
    assert found["tokenizer.ggml.pre"] == "smollm"
    assert found["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert found["tokenizer.ggml.eos_token_id"] == 2
    assert found["tokenizer.ggml.token_type"][2] == 3  # control
    assert found["tokenizer.ggml.token_type"][1000] == 1


def test_a_model_that_readers_would_compute_otherwise_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "gelu", hidden_act="gelu")
    base = Base.of(resolve(str(folder)))
    with pytest.raises(ModelError, match="activation is gelu"):
        write_gguf(folder, tmp_path / "out.gguf", base, quant="f16", name="tiny")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_window_that_readers_do_not_have_bounds_the_context_instead(tmp_path: Path) -> None:
    architecture = Architecture(model_type="mistral", class_name="MistralForCausalLM", group="decoder")
    base = Base.of(resolve(str(write_tiny_model(architecture, tmp_path / "base", sliding_window=8))))
    write_gguf(base.resolved.folder, tmp_path / "out.gguf", base, quant="f16", name="tiny")
    assert GGUFReader(tmp_path / "out.gguf").fields["llama.context_length"].contents() == 8


def test_a_file_that_exists_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.gguf").write_text("years of work")
    base = tiny_base("llama", tmp_path / "base")
    with pytest.raises(OutputInUse):
        write_gguf(base.resolved.folder, tmp_path / "thesis.gguf", base, quant="f16", name="tiny")
    assert (tmp_path / "thesis.gguf").read_text() == "years of work"


def test_the_modelfile_has_the_template_of_training_and_its_stops(smollm2_folder: Path, tmp_path: Path) -> None:
    base = Base.of(resolve(str(smollm2_folder)))
    assert write_modelfile(tmp_path / "m.Modelfile", tmp_path / "m.gguf", base)
    text = (tmp_path / "m.Modelfile").read_text()
    assert text.startswith("FROM ./m.gguf\n")
    assert 'PARAMETER stop "<|im_end|>"' in text
    surroundings = surroundings_of(base.renderer)
    assert surroundings is not None
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    for chat in (
        [("user", "How many?")],
        [("system", "Be brief."), ("user", "How many?"), ("assistant", "Two."), ("user", "Sure?")],
    ):
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert surroundings.render(tuple(chat)) == expected
    assert "You are a helpful AI assistant named SmolLM" in surroundings.start  # written only without a system turn
    assert '{{ if ne (index .Messages 0).Role "system" }}' in go_template(surroundings)


def test_a_template_that_does_more_than_surround_texts_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "base")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ messages|length }}\n{% endif %}"
    )
    base = Base.of(resolve(str(folder)))
    assert not write_modelfile(tmp_path / "m.Modelfile", tmp_path / "m.gguf", base)
    text = (tmp_path / "m.Modelfile").read_text()
    assert "TEMPLATE" not in text
    assert "cannot be written in Ollama's language" in text


def llama_cpp_reader(file: Path) -> Any:
    """An independent reader: llama-cpp-python (`uv sync --group peers`, built from source)."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (uv sync --group peers)")
    return llama_cpp.Llama(str(file), n_ctx=512, verbose=False, n_threads=1, logits_all=True)


def llama_cpp_logits(reader: Any, ids: list[int]) -> torch.Tensor:
    """float64 [L, V]"""
    reader.reset()
    reader.eval(ids)
    return torch.from_numpy(reader.scores[: len(ids)].copy()).double()


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["f16", "q8_0"])
def test_llama_cpp_reads_the_same_ids_and_writes_the_same_answer(
    quant: str, smollm2_folder: Path, tmp_path: Path
) -> None:
    base = Base.of(resolve(str(smollm2_folder)))
    file = write_gguf(smollm2_folder, tmp_path / "m.gguf", base, quant=quant, name="smollm2").path
    reader = llama_cpp_reader(file)
    text = "Count the 12 zebras at Kilima Hill, 06:45; ¿qué más? 数を言ってください。"
    assert reader.tokenize(text.encode(), add_bos=False, special=False) == base.tokenizer.encode(text)
    ids = probe_ids(base)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    whole = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0].double()
    found = llama_cpp_logits(reader, whole)
    # 8 bits round the weights, and llama.cpp then rounds what goes into each layer, too
    assert relative_distance(expected, found) < {"f16": 5e-3, "q8_0": 0.1}[quant]
    # What it would write after each beginning of the answer: another token only where the best two are nearly even.
    writes = slice(len(ids) - 1, len(whole) - 1)
    best, second = expected[writes].topk(2).values.T
    differs = found[writes].argmax(-1) != torch.tensor(whole[len(ids) :])
    assert not bool((differs & (best - second > {"f16": 0.0, "q8_0": 0.25}[quant])).any())
    got = []
    reader.reset()
    for token in reader.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        got.append(token)
        if len(got) == len(whole) - len(ids) or token in base.renderer.stop_ids:
            break
    same = len(got) if not bool(differs.any()) else int(differs.nonzero()[0, 0])
    assert same >= 16
    assert got[:same] == whole[len(ids) :][:same]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_llama_cpp_computes_what_each_family_computes(model_type: str, tmp_path: Path) -> None:
    """Activations, norms, rotations, windows and scales: each architecture's own, in a reader that shares no code."""
    base = tiny_base(model_type, tmp_path / "base")
    file = write_gguf(base.resolved.folder, tmp_path / "m.gguf", base, quant="f32", name="tiny").path
    found = llama_cpp_logits(llama_cpp_reader(file), probe_ids(base))
    assert relative_distance(logits(base.resolved.folder, base), found) < 2e-3
