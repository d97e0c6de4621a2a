"""Guards that every HTTP route and every RPC asks for a key, health aside, and that keys stay out of logs and disk."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from daemon_process import DaemonProcess
from model_folder import write_model
from rpc_client import RpcClient, all_methods, details

from gym_sdk._proto.gym.v1 import jobs_pb2, models_pb2, server_pb2
from gym_sdk.errors import OutputInUse, UserError
from gym_serve._database import Database
from gym_serve.auth import ensure_local_key, list_keys
from gym_serve.daemon import Daemon
from gym_serve.http.gateway import OPEN_PATHS, Gateway
from gym_serve.settings import load_settings

USER_KEY = "gym-user-" + secrets.token_urlsafe(24)
ADMIN_KEY = "gym-admin-" + secrets.token_urlsafe(24)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("auth")
    keys = {"GYM_API_KEY": USER_KEY, "GYM_ADMIN_KEY": ADMIN_KEY}
    with DaemonProcess(folder / "data", str(write_model(folder / "tiny")), environment=keys) as process:
        yield process.wait_ready()


def all_routes(folder: Path) -> list[tuple[str, str]]:
    """Method and path of every HTTP route, from the application itself."""
    settings = load_settings(None, {"server": {"data_dir": str(folder)}, "engine": {"kind": "stand_in_engine:start"}})
    app = Daemon(settings).http_app()
    assert isinstance(app, Gateway)
    found = [(method, route.path) for route in app.routes for method in sorted(route.methods or ())]
    return [(method, re.sub(r"\{.*?\}", "x", path)) for method, path in found]


def test_every_http_route_asks_for_a_key(daemon: DaemonProcess, tmp_path: Path) -> None:
    routes = all_routes(tmp_path)
    assert len(routes) > 60
    assert {path for _, path in routes} >= {*OPEN_PATHS, "/metrics", "/v1/models/x", "/gym.v1.KeyService/CreateKey"}
    with httpx.Client(base_url=daemon.http_url) as http:
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer gym-wrong"}, {"authorization": f"Basic {USER_KEY}"}):
                response = http.request(method, path, headers=headers)
                if path in OPEN_PATHS:
                    assert response.status_code in (200, 503), (method, path)
                else:
                    assert response.status_code == 401, (method, path, headers)
        assert http.get("/nothing-here").status_code == 401, "who has no key learns nothing of what there is"


def test_every_rpc_asks_for_a_key(daemon: DaemonProcess) -> None:
    for key in (None, "gym-wrong"):
        with RpcClient(daemon.grpc_address, key) as rpc:
            count = 0
            for service, method, request, streams in all_methods():
                call = rpc.drain if streams else rpc.call
                with pytest.raises(grpc.RpcError) as refused:
                    call(service, method, request)
                code, info, _ = details(refused.value)
                assert code == "UNAUTHENTICATED", (service, method)
                assert info.reason == ("KEY_MISSING" if key is None else "KEY_INVALID")
                count += 1
            assert count > 35
            with pytest.raises(grpc.RpcError) as refused:
                rpc.reflect()
            assert details(refused.value)[0] == "UNAUTHENTICATED"


def test_admin_calls_refuse_a_users_key(daemon: DaemonProcess) -> None:
    with RpcClient(daemon.grpc_address, USER_KEY) as rpc:
        calls = [
            ("KeyService", "CreateKey", server_pb2.CreateKeyRequest(name="x", scope=server_pb2.KEY_SCOPE_ADMIN)),
            ("KeyService", "ListKeys", server_pb2.ListKeysRequest()),
            ("KeyService", "RevokeKey", server_pb2.RevokeKeyRequest(key_id="x")),
            ("JobService", "ListJobs", jobs_pb2.ListJobsRequest(all_owners=True)),
            ("ModelService", "CreateModel", models_pb2.CreateModelRequest(base=models_pb2.BaseSource(source="a/b"))),
            ("ModelService", "LoadModel", models_pb2.LoadModelRequest(model_id="tiny")),
            ("ModelService", "UnloadModel", models_pb2.UnloadModelRequest(model_id="tiny")),
            ("ModelService", "DeleteModel", models_pb2.DeleteModelRequest(model_id="tiny")),
        ]
        for service, method, request in calls:
            with pytest.raises(grpc.RpcError) as refused:
                rpc.call(service, method, request)
            code, info, _ = details(refused.value)
            assert (code, info.reason) == ("PERMISSION_DENIED", "ADMIN_REQUIRED"), method
    with daemon.http(USER_KEY) as http:
        assert http.get("/metrics").status_code == 403
        assert http.delete("/v1/models/tiny").status_code == 403
        assert http.get("/v1/models").status_code == 200
    with daemon.http(ADMIN_KEY) as http:
        assert http.get("/metrics").status_code == 200


def test_keys_are_never_written_down(daemon: DaemonProcess) -> None:
    with daemon.http(USER_KEY) as http:
        http.get("/v1/models")
    with daemon.http("gym-a-wrong-key") as http:
        http.get("/v1/models")
    written = daemon.log + "".join(
        path.read_bytes().decode("latin-1") for path in daemon.data_dir.glob("gym.db*") if path.is_file()
    )
    for secret in (USER_KEY, ADMIN_KEY, "gym-a-wrong-key", daemon.key):
        assert secret not in written
    assert "gym_serve.audit" in daemon.log, "who was refused is in the audit log"
    assert (daemon.data_dir / "local.key").stat().st_mode & 0o777 == 0o600
    assert daemon.data_dir.stat().st_mode & 0o077 in (0, 0o055), "made by the test before the daemon"


def make(folder: Path, **server: object) -> Daemon:
    overrides = {"server": {"data_dir": str(folder), **server}, "engine": {"kind": "stand_in_engine:start"}}
    return Daemon(load_settings(None, overrides))


def test_a_public_address_needs_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no key was made"):
        make(tmp_path, host="0.0.0.0")
    monkeypatch.setenv("GYM_API_KEY", USER_KEY)
    make(tmp_path / "other", host="0.0.0.0")


def test_a_weak_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_API_KEY", "secret")
    with pytest.raises(UserError, match="shorter than 16"):
        make(tmp_path)


def test_two_daemons_never_share_a_data_directory(tmp_path: Path) -> None:
    first = make(tmp_path)
    with pytest.raises(OutputInUse, match="another daemon runs"):
        make(tmp_path)
    assert first is not None


def test_the_local_key_stays_the_same_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "local.key"
    database = Database(tmp_path / "gym.db")
    key = database.write_now(lambda connection: ensure_local_key(connection, path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert database.write_now(lambda connection: ensure_local_key(connection, path)) == key
    path.chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        database.write_now(lambda connection: ensure_local_key(connection, path))
    path.unlink()
    assert database.write_now(lambda connection: ensure_local_key(connection, path)) != key
    keys = database.write_now(list_keys)
    assert [one.revoked_at is None for one in keys] == [False, True], "the lost key opens nothing any more"
    database.close()
