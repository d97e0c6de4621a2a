"""Guards the public names: removing one, or adding one by accident, is a decision, taken here."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from gym_sdk.client import AsyncGym, Gym
from gym_sdk.client._async.jobs import AsyncJob
from gym_sdk.client._sync.jobs import Job

REPOSITORY = Path(__file__).resolve().parents[3]

SURFACE = {
    "gym_sdk": "AsyncGym Gym GymError RunDir RunSpec load_spec read_events",
    "gym_sdk.spec": ("SPEC_VERSION canonical_json dump_yaml load_spec parse_spec sha256 spec_from_data RunSpec"),
    "gym_sdk.events": (
        "ArtifactEvent CheckpointEvent EventWriter LogEvent LogLevel MetricEvent ProgressEvent RunEvent RunState "
        "StateEvent UnknownEvent event_from_proto event_to_proto read_events"
    ),
    "gym_sdk.client": (
        "AsyncGym CHANNEL_OPTIONS Gym MAX_MESSAGE_BYTES SERVER_OPTIONS Settings local_key_path resolve_settings"
    ),
    "gym_sdk.client.errors": (
        "Aborted AuthenticationFailed Conflict FieldViolation InvalidRequest LimitExceeded NotFound PermissionDenied "
        "RemoteError ServerFault TimedOut Unavailable remote_error"
    ),
    "gym_sdk.cli": "Command main",
}
RESOURCES = {
    "files": "delete download get list upload",
    "jobs": "artifacts cancel checkpoints create delete events files get list logs pause resume validate wait",
    "models": "create_adapter create_base create_experiences create_from_job"
    " delete delete_alias get list load set_alias unload",
    "chat": "count_tokens create stream",
    "keys": "create list revoke",
}


@pytest.mark.parametrize("module", list(SURFACE))
def test_the_names_of_a_module_are_these(module: str) -> None:
    loaded = importlib.import_module(module)
    wanted = set(SURFACE[module].split())
    if module == "gym_sdk.spec":
        # The sections of a run are public too; they grow with the specification.
        assert wanted <= set(loaded.__all__)
    else:
        assert set(loaded.__all__) == wanted
    assert all(getattr(loaded, name) is not None for name in loaded.__all__)
    assert set(loaded.__all__) <= set(dir(loaded))
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_that_name'"):
        _ = loaded.nothing_of_that_name


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("resource", list(RESOURCES))
def test_both_clients_have_these_resources_with_these_parameters(resource: str) -> None:
    blocking, asynchronous = (getattr(kind("grpc://x", api_key="k"), resource) for kind in (Gym, AsyncGym))
    assert public(blocking) == public(asynchronous) == set(RESOURCES[resource].split())
    for name in public(blocking) - {"files"}:
        parameters = [list(inspect.signature(getattr(each, name)).parameters) for each in (blocking, asynchronous)]
        assert parameters[0] == parameters[1]


def test_a_job_can_do_these_things() -> None:
    assert public(Job) == public(AsyncJob)
    wanted = "adapter artifact artifacts cancel checkpoints delete events logs pause refresh resume spec wait"
    assert set(wanted.split()) <= public(Job)


def test_the_version_is_the_packages() -> None:
    import gym_sdk

    assert gym_sdk.__version__[0].isdigit()


def test_the_blocking_client_is_the_asynchronous_one() -> None:
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools/generate_sync.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
