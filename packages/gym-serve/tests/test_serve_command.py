"""Guards `gym serve` as a user types it: a run, bad input in one message, every setting with its documentation."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
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


def gym(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(Path(__file__).parent), "GYM_DATA_DIR": str(cwd / "data")}
    return subprocess.run(
        [sys.executable, "-c", "from gym_sdk.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, **own, **(environment or {})},
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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nope", "nope is not on this machine"),
        ("./nope", "there is no file or folder ./nope"),
        ("package:no_such_module/x.gguf", "no_such_module"),
        ("empty", "has no config.json"),
        ("rows.jsonl", "is a .jsonl file"),
    ],
)
def test_a_model_that_is_not_there_ends_the_command_before_anything_listens(
    tmp_path: Path, model: str, message: str
) -> None:
    (tmp_path / "serve.toml").write_text('[engine]\nkind = "stand_in_engine:start"\n', encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").touch()
    data_dir = tmp_path / "data"
    options = ("--port", "0", "--grpc-port", "0", "--data-dir", str(data_dir), "--settings", "serve.toml")
    result = gym("serve", model, *options, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "listening" not in result.stderr
    assert "Traceback" not in result.stderr
    with closing(sqlite3.connect(data_dir / "gym.db")) as database:
        assert database.execute("SELECT id FROM models").fetchall() == [], "it is not remembered as a model"


def test_a_data_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "gym.db").write_bytes(b"no database at all" * 100)
    for folder, message in (
        (tmp_path / "file", "the data directory cannot be written: File exists"),
        (tmp_path / "file" / "below", "the data directory cannot be written: Not a directory"),
        (Path("/proc/gym"), "the data directory cannot be written: No such file or directory"),
        (broken, "the database cannot be opened: file is not a database"),
    ):
        result = gym("serve", "--data-dir", str(folder), cwd=tmp_path)
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr
        assert "Traceback" not in result.stderr


def test_a_certificate_that_is_none_is_said(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("nothing\n", encoding="utf-8")
    (tmp_path / "serve.toml").write_text(
        '[engine]\nkind = "stand_in_engine:start"\n[server]\ntls_certificate = "cert.pem"\ntls_key = "key.pem"\n',
        encoding="utf-8",
    )
    result = gym("serve", "--port", "0", "--grpc-port", "0", "--settings", "serve.toml", cwd=tmp_path)
    assert (result.returncode, "cert.pem: the TLS certificate" in result.stderr) == (2, True), result.stderr


def test_serve_an_adapter_folder(tmp_path: Path) -> None:
    base = write_model(tmp_path / "tiny")
    adapter = write_adapter_folder(tmp_path / "patrol", "patrol")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with DaemonProcess(tmp_path / "data", str(adapter)) as daemon:
        daemon.wait_ready()
        client = openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key)
        assert [model.id for model in client.models.list()] == ["tiny", "patrol"]
        answer = client.chat.completions.create(model="patrol", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "patrol"


def test_a_run_that_made_no_model_is_refused_with_the_next_step(tmp_path: Path) -> None:
    run = finished_run(tmp_path, None)
    (tmp_path / "serve.toml").write_text('[engine]\nkind = "stand_in_engine:start"\n', encoding="utf-8")
    result = gym("serve", str(run.path), "--port", "0", "--grpc-port", "0", "--settings", "serve.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "the run has made no model yet" in result.stderr
    assert f"gym train --resume {run.path}" in result.stderr


def test_a_port_that_is_taken_is_said(shared_daemon: DaemonProcess, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[engine]\nkind = "stand_in_engine:start"\n', encoding="utf-8")
    for option, other, address in (
        ("--port", "--grpc-port", shared_daemon.http_url),
        ("--grpc-port", "--port", shared_daemon.grpc_target),
    ):
        port = address.rpartition(":")[2]
        result = gym("serve", option, port, other, "0", "--settings", "serve.toml", cwd=tmp_path)
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: port {port} of 127.0.0.1 is in use"), result.stderr
        assert option in result.stderr.splitlines()[1]


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
