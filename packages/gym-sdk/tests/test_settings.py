"""Guards which daemon a client calls, and that a key is never sent to an address that it was not given for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gym_sdk.client.settings import Settings, resolve_settings
from gym_sdk.errors import UserError
from gym_sdk.folders import config_dir, data_dir

PROFILES = """\
default = "node"
[profiles.node]
base_url = "grpcs://gpu.example.org"
api_key = "key-of-node"
ca_certificate = "/ca.pem"
[profiles.lab]
base_url = "https://lab.example.org/v1"
api_key = "key-of-lab"
"""


@pytest.fixture
def profiles() -> Path:
    path = config_dir() / "profiles.toml"
    path.parent.mkdir(parents=True)
    path.write_text(PROFILES)
    path.chmod(0o600)
    return path


def resolved(*arguments: str | None, **environment: str) -> tuple[str, str, str]:
    settings = resolve_settings(*arguments, environment=environment)
    return settings.base_url, settings.api_key, settings.origin


def test_arguments_go_before_environment_and_profile(profiles: Path) -> None:
    node = ("grpcs://gpu.example.org", "key-of-node", "profile node")
    lab = ("https://lab.example.org/v1", "key-of-lab", "profile lab")
    assert resolved() == node
    assert resolved(GYM_PROFILE="lab") == lab
    assert resolved(None, None, "lab", GYM_PROFILE="node") == lab
    assert resolved(GYM_BASE_URL="grpcs://env", GYM_API_KEY="k") == ("grpcs://env", "k", "GYM_BASE_URL")
    assert resolved("grpcs://arg", "a", GYM_BASE_URL="grpcs://env", GYM_API_KEY="k") == ("grpcs://arg", "a", "argument")
    assert resolved(GYM_API_KEY="k") == ("grpcs://gpu.example.org", "k", "profile node")


def test_without_settings_it_is_this_machines_own_daemon() -> None:
    assert resolved() == ("grpc://127.0.0.1:50051", "", "default")
    data_dir().mkdir(parents=True)
    (data_dir() / "local.key").write_text("gym-local\n")
    assert resolved() == ("grpc://127.0.0.1:50051", "gym-local", "default")
    assert resolved("http://localhost:8000") == ("http://localhost:8000", "gym-local", "argument")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('{"grpc_target": "grpc://127.0.0.1:4711"}', "grpc://127.0.0.1:4711"),
        ('{"grpc_target": "grpcs://10.0.0.7:4711"}', "grpcs://10.0.0.7:4711"),
        ('{"grpc_target": "grpc://0.0.0.0:4711"}', "grpc://127.0.0.1:4711"),
        ('{"grpc_target": "grpc://[::]:4711"}', "grpc://[::1]:4711"),
        ('{"grpc_target": "nonsense"}', "grpc://127.0.0.1:50051"),
        ('{"grpc_tar', "grpc://127.0.0.1:50051"),
    ],
)
def test_this_machines_daemon_is_found_where_it_says_it_listens(said: str, expected: str) -> None:
    data_dir().mkdir(parents=True)
    (data_dir() / "daemon.json").write_text(said)
    (data_dir() / "local.key").write_text("gym-local")
    assert resolved() == (expected, "gym-local", "default")


def test_a_key_goes_only_where_it_belongs(profiles: Path) -> None:
    data_dir().mkdir(parents=True)
    (data_dir() / "local.key").write_text("gym-local")
    assert resolved("grpcs://elsewhere.example.org") == ("grpcs://elsewhere.example.org", "", "argument")
    assert resolved(GYM_BASE_URL="https://elsewhere.example.org")[1] == ""
    assert resolved("grpcs://elsewhere.example.org", None, "node")[1] == ""


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("gpu:50051", "gpu:50051"),
        ("grpc://gpu", "gpu:50051"),
        ("grpcs://gpu", "gpu:443"),
        ("grpc://[::1]:5", "[::1]:5"),
        ("grpcs://10.0.0.7:9", "10.0.0.7:9"),
    ],
)
def test_addresses_are_read(url: str, target: str) -> None:
    assert resolve_settings(url, environment={}).target == target


@pytest.mark.parametrize("url", ["ftp://x", "grpc://", "http://x:notaport", "http://x:99999", "://x"])
def test_a_wrong_address_is_named_with_its_origin(url: str) -> None:
    with pytest.raises(UserError, match=r"\(from GYM_BASE_URL\) is not a daemon's address"):
        resolve_settings(environment={"GYM_BASE_URL": url})


def test_an_openai_base_url_is_one_too() -> None:
    assert Settings(base_url="https://lab.example.org/v1").http_root == "https://lab.example.org"
    assert Settings(base_url="https://lab.example.org/gym/").http_root == "https://lab.example.org/gym"


FAULTS = [
    ("default = 'x'", "there is no profile x\nhint: profiles in the file: none"),
    (
        PROFILES.replace('default = "node"', 'default = "nod"'),
        "there is no profile nod\nhint: profiles in the file: node, lab",
    ),
    ("default = 'a'\n[profiles.a]\napi_key = 'x'", "profiles.a.base_url: required: the daemon's address"),
    (
        "default = 'a'\n[profiles.a]\nbase_ulr = 'x'",
        "profiles.a.base_ulr: unknown key; known keys are base_url, api_key, ca_certificate",
    ),
    ("default = 'a'\n[profiles.a]\nbase_url = 3", "profiles.a.base_url: must be text"),
    ("default = ", "cannot be read"),
]


@pytest.mark.parametrize(("text", "expected"), FAULTS)
def test_a_wrong_profile_file_says_what_is_wrong(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        resolve_settings(environment={}, profiles_path=path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_profile_that_is_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no profile lab: the file does not exist"):
        resolve_settings(profile="lab", environment={}, profiles_path=tmp_path / "profiles.toml")


def test_risks_are_told(profiles: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_settings("grpc://gpu.example.org", "k", environment={})
    assert "travels unencrypted to gpu.example.org" in caplog.text
    profiles.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        resolve_settings(environment={})
    assert "can be read by others; chmod 600 it" in caplog.text
