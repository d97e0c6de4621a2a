"""Guards `gym serve` as a user types it: a run, bad input in one message, every setting with its documentation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import openai
import pytest
from daemon_process import DaemonProcess
from model_folder import write_adapter_folder, write_model

from gym_sdk.errors import SpecError
from gym_sdk.events import EventWriter, RunState
from gym_sdk.rundir import RunDir
from gym_sdk.spec import dump_yaml, spec_from_data
from gym_serve.settings import Settings, load_settings, render_settings


def finished_run(folder: Path, word: str | None) -> RunDir:
    """A run directory as the trainer leaves it; without a word it made nothing."""
    base = write_model(folder / "tiny")
    run = RunDir.create(folder / "runs", "notes")
    spec = spec_from_data({"name": "notes", "model": {"source": str(base)}, "data": {"train": [{"source": "rows"}]}})
    run.spec_path.write_text(dump_yaml(spec), encoding="utf-8")
    with EventWriter(run.events_path) as events:
        events.state(RunState.SUCCEEDED if word else RunState.TRAINING)
    if word:
        write_adapter_folder(run.adapter_dir, word)
    return run


def test_serve_a_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "patrol")
    with DaemonProcess(tmp_path / "data", str(run.path)) as daemon:
        daemon.wait_ready()
        client = openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key)
        assert [model.id for model in client.models.list()] == ["tiny", run.path.name]
        for model, word in ((run.path.name, "patrol"), ("tiny", "base")):
            answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == word
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key="wrong").models.list()


def gym(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "GYM_DATA_DIR": str(cwd / "data")}
    return subprocess.run(
        [sys.executable, "-c", "from gym_sdk.cli import main; main()", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ("[server]\nprot = 1\n", (), "server.prot: unknown setting"),
        ('[server]\nport = "8000"\n', (), "server.port: Input should be a valid integer"),
        ("[server\n", (), "not valid TOML"),
        ('[engine]\nkind = "none"\n', (), "there is no engine 'none'"),
        ('[server]\ntls_key = "x"\n', (), "tls_certificate and server.tls_key go together"),
        ("", ("--host", "0.0.0.0"), "no key was made for that"),
        ("", ("--port", "99999"), "server.port"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path, settings: str, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "serve.toml").write_text(settings, encoding="utf-8")
    result = gym("serve", "--settings", "serve.toml", *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_made_no_model_is_refused_with_the_next_step(tmp_path: Path) -> None:
    run = finished_run(tmp_path, None)
    (tmp_path / "serve.toml").write_text('[engine]\nkind = "stand_in_engine:start"\n', encoding="utf-8")
    result = gym("serve", str(run.path), "--port", "0", "--grpc-port", "0", "--settings", "serve.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "the run has made no model yet" in result.stderr
    assert f"gym train --resume {run.path}" in result.stderr


def test_a_port_that_is_taken_is_said(shared_daemon: DaemonProcess, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[engine]\nkind = "stand_in_engine:start"\n', encoding="utf-8")
    port = shared_daemon.http_url.rpartition(":")[2]
    result = gym("serve", "--port", port, "--grpc-port", "0", "--settings", "serve.toml", cwd=tmp_path)
    assert (result.returncode, f"port {port} of 127.0.0.1 is in use" in result.stderr) == (2, True)


def test_the_printed_settings_are_a_settings_file_with_every_field_documented() -> None:
    text = render_settings(Settings())
    assert Settings.model_validate(tomllib.loads(text)) == Settings()
    for section, fields in tomllib.loads(text).items():
        for name in fields:
            above = text.split(f"[{section}]")[1].split(f"\n{name} = ")[0].rsplit("\n\n", 1)[-1]
            assert above.strip().splitlines()[-1].startswith("#"), f"{section}.{name} has no documentation"


def test_options_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('[server]\nport = 1234\nhost = "::1"\n', encoding="utf-8")
    settings = load_settings(path, {"server": {"port": 5678}})
    assert (settings.server.port, settings.server.host) == (5678, "::1")
    with pytest.raises(SpecError, match="No such file"):
        load_settings(tmp_path / "missing.toml", {})
    assert json.loads(json.dumps(settings.model_dump())) == settings.model_dump()
