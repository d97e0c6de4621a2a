"""Guards restarts that refuse no connection: `--keep-running`, and sockets that are handed over as systemd does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
from daemon_process import DaemonProcess
from model_folder import write_model
from test_daemon_robustness import until
from test_serve_command import gym

TAKE = """
import os, sys
from gym_sdk.errors import GymError
from gym_serve.listening import take_inherited
os.environ["LISTEN_PID"] = str(os.getpid()) if sys.argv[1] == "own" else "1"
os.environ["LISTEN_FDS"] = sys.argv[2]
try:
    sockets = take_inherited(os.environ)
except GymError as error:
    sys.exit(f"refused: {error}")
print([sock.getsockname()[1] for sock in sockets], [sock.get_inheritable() for sock in sockets],
      [name for name in os.environ if name.startswith("LISTEN_")])
"""


def daemon_pid(daemon: DaemonProcess) -> int:
    return json.loads((daemon.data_dir / "daemon.json").read_text(encoding="utf-8"))["pid"]


def test_connections_wait_while_a_killed_daemon_is_started_again(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", str(write_model(tmp_path / "tiny")), "--keep-running") as daemon:
        daemon.wait_ready()
        keeper, first = daemon.process, daemon_pid(daemon)
        assert keeper is not None
        assert keeper.pid != first
        client = openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key, max_retries=0)
        os.kill(first, signal.SIGKILL)
        while Path(f"/proc/{first}").exists():
            time.sleep(0.001)
        # No daemon runs, none is ready for some seconds, and nothing is tried twice.
        answers: list[str | None] = []

        def ask(number: int) -> None:
            messages = [{"role": "user", "content": f"say:w{number}"}]
            answer = client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
            answers.append(answer.choices[0].message.content)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, answers)) == sorted(f"w{number}" for number in range(20))
        second = daemon_pid(daemon)
        assert second != first
        assert "the daemon was ended by SIGKILL and is started again" in daemon.log
        assert daemon.stop() == 0
        assert not Path(f"/proc/{second}").exists(), "SIGTERM of the keeper ends both"
        assert daemon.log.rstrip().endswith("stopped")


def test_a_mistake_in_the_settings_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[engine]\nkind = "none"\n', encoding="utf-8")
    result = gym(
        *("serve", "--keep-running", "--port", "0", "--grpc-port", "0", "--settings", "serve.toml"), cwd=tmp_path
    )
    assert (result.returncode, result.stderr.count("there is no engine 'none'")) == (2, 1), result.stderr


def take(descriptor: int, whose: str = "own", count: str = "1") -> subprocess.CompletedProcess[str]:
    """What a process makes of the socket that it gets as descriptor 3."""
    shell = f'exec 3<&{descriptor}; exec "$@"'
    return subprocess.run(
        ["bash", "-c", shell, "sh", sys.executable, "-c", TAKE, whose, count],
        pass_fds=(descriptor,),
        capture_output=True,
        text=True,
        check=False,
    )


def test_inherited_sockets_are_taken_as_systemd_hands_them_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert take(listening.fileno()).stdout == f"[{port}] [False] []\n"
        assert take(listening.fileno(), whose="another's").stdout == "[] [] []\n", "meant for another process"
        assert take(listening.fileno(), count="0").stdout == "[] [] []\n"
        assert "should be a number" in take(listening.fileno(), count="x").stderr
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_INET, kind) as other:
            other.bind(("127.0.0.1", 0))
            assert "is no listening TCP socket" in take(other.fileno()).stderr
    with open(os.devnull) as file:
        assert "is no socket" in take(file.fileno()).stderr


def serve_on(listening: socket.socket, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`gym serve` on a socket that is handed over."""
    (folder / "serve.toml").write_text('[engine]\nkind = "stand_in_engine:start"\n', encoding="utf-8")
    command = (
        'import os; os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1");from gym_sdk.cli import main; main()'
    )
    with (folder / "serve.log").open("ab") as log:
        return subprocess.Popen(
            [
                *("bash", "-c", f'exec 3<&{listening.fileno()}; exec "$@"', "sh", sys.executable, "-c", command),
                *("serve", *arguments, "--grpc-port", "0", "--data-dir", str(folder / "data")),
                *("--settings", str(folder / "serve.toml")),
            ],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            pass_fds=(listening.fileno(),),
            stdout=log,
            stderr=log,
        )


def test_an_upgrade_ends_the_answers_that_run_and_refuses_nobody(tmp_path: Path) -> None:
    """As `systemctl restart` with the socket unit: SIGTERM, then a new daemon on the same socket."""
    model = str(write_model(tmp_path / "tiny"))
    key_path = tmp_path / "data" / "local.key"
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        old = serve_on(listening, tmp_path, model)
        until(key_path.exists, "the key")
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1",
            api_key=key_path.read_text(encoding="ascii").strip(),
            max_retries=0,
        )

        def ask(content: str) -> str | None:
            messages = [{"role": "user", "content": content}]
            answer = client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
            return answer.choices[0].message.content

        messages = [{"role": "user", "content": "tokens:2000"}]
        stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)  # type: ignore[call-overload]
        chunks = iter(stream)
        next(chunks)
        old.terminate()
        until(lambda: "draining" in (tmp_path / "serve.log").read_text(encoding="utf-8"), "the drain")
        with ThreadPoolExecutor() as pool:
            during = pool.submit(ask, "say:during")
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "x" * 2000
            assert old.wait(timeout=60) == 0
            between = pool.submit(ask, "say:between")
            new = serve_on(listening, tmp_path, model)
            assert (during.result(timeout=60), between.result(timeout=60)) == ("during", "between")
        new.terminate()
        assert new.wait(timeout=60) == 0


def test_a_public_socket_that_is_handed_over_needs_keys_too(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        assert serve_on(listening, tmp_path).wait(timeout=60) == 2
    assert "no key was made for that" in (tmp_path / "serve.log").read_text(encoding="utf-8")
