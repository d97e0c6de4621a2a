"""Guards the committed stubs: they load beside OpenAI's `gym`, keep their module names, and are what proto/ says."""

from __future__ import annotations

import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from gym_sdk._proto.gym import v1
from gym_sdk._proto.gym.v1 import events_pb2, jobs_pb2

REPOSITORY = Path(__file__).resolve().parents[3]
MODULES = [f"{v1.__name__}.{module.name}" for module in pkgutil.iter_modules(v1.__path__)]


def test_every_proto_has_its_stub() -> None:
    protos = {path.stem for path in (REPOSITORY / "proto/gym/v1").glob("*.proto")}
    assert {name.rsplit(".", 1)[-1].removesuffix("_pb2") for name in MODULES if name.endswith("_pb2")} == protos
    assert {"jobs", "files", "models", "inference", "server", "events", "errors"} <= protos


def test_stubs_load_beside_a_package_that_is_named_gym(tmp_path: Path) -> None:
    # OpenAI's reinforcement-learning `gym` holds the plain name where it is installed.
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "__init__.py").write_text("def make(name): return name\n")
    code = "import gym\n" + "".join(f"import {name}\n" for name in MODULES) + "print(gym.make('CartPole-v1'))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "CartPole-v1\n"), result.stderr


def test_messages_know_where_they_live() -> None:
    assert jobs_pb2.Job.__module__ == "gym_sdk._proto.gym.v1.jobs_pb2"
    assert pickle.loads(pickle.dumps(jobs_pb2.Job(id="a"))).id == "a"


def test_events_hold_no_64_bit_integers() -> None:
    # Proto-JSON prints them as text; messages that only travel in binary may have them.
    for message in events_pb2.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert field.cpp_type not in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64), f"{message.name}.{field.name}"


@pytest.mark.packaging
def test_the_stubs_are_what_the_protos_say() -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "tools/generate_stubs.py"), "--check"], check=True)


@pytest.mark.packaging
def test_the_protos_are_well_named_and_break_no_older_client() -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "tools/check_protos.py")], check=True)


@pytest.mark.packaging
def test_stubs_load_beside_openais_gym(sdk_wheel: Path) -> None:
    code = "import gym\n" + "".join(f"import {name}\n" for name in MODULES) + "print(gym.__version__, gym.make)"
    # gym 0.26 runs on numpy < 2.
    pins = ("--with", str(sdk_wheel), "--with", "gym==0.26.2", "--with", "numpy<2")
    command = ["uv", "run", "--isolated", "--no-project", *pins, "python", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0.26.2")
