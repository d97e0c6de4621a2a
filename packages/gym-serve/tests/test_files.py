"""Guards the file store: quotas, garbage collection, expiry, names that never become paths."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from daemon_process import DaemonProcess
from rpc_client import RpcClient
from test_daemon_robustness import until

from gym_sdk._proto.gym.v1 import files_pb2
from gym_serve._database import Database
from gym_serve.auth import Key, Quota, Scope
from gym_serve.errors import Reason, ServiceError
from gym_serve.files.announced import Announced
from gym_serve.files.blobs import BlobStore
from gym_serve.files.service import FileService
from gym_serve.settings import FileSettings, LimitSettings

ANN = Key(id="key-ann", name="ann", scope=Scope.USER)
BEN = Key(id="key-ben", name="ben", scope=Scope.USER, quota=Quota(max_storage_bytes=10))


async def chunks(*data: bytes) -> AsyncIterator[bytes]:
    for chunk in data:
        yield chunk


def scenario(function: Callable[[Path, FileService], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        database = Database(tmp_path / "gym.db")
        limits = LimitSettings(max_file_bytes=1000)
        files = FileService(database, BlobStore(tmp_path), limits, FileSettings(upload_expiry_s=0.001))
        asyncio.run(asyncio.wait_for(function(tmp_path, files), 30))
        database.close()

    run.__name__ = function.__name__
    return run


def blobs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "blobs").rglob("*") if path.is_file())


@scenario
async def test_equal_content_is_kept_once_and_goes_with_its_last_file(folder: Path, files: FileService) -> None:
    one = await files.uploads.create(ANN, filename="a.txt", purpose="user_data", data=chunks(b"same"))
    two = await files.uploads.create(ANN, filename="b.txt", purpose="user_data", data=chunks(b"sa", b"me"))
    assert blobs(folder) == [hashlib.sha256(b"same").hexdigest()]
    await files.delete(ANN, one.id)
    assert await files.collect(min_age_s=-1) == 0
    await files.delete(ANN, two.id)
    assert await files.collect(min_age_s=3600) == 0, "young content may belong to a call that goes on just now"
    assert await files.collect(min_age_s=-1) == 1
    assert blobs(folder) == []


@scenario
async def test_a_linked_file_outlives_its_deletion(folder: Path, files: FileService) -> None:
    file = await files.uploads.create(ANN, filename="rows.JSONL.gz", purpose="user_data", data=chunks(b"rows"))
    path = files.link(file, folder / "job")
    assert path == folder / "job" / f"{file.id}.jsonl.gz"
    await files.delete(ANN, file.id)
    await files.collect(min_age_s=-1)
    assert path.read_bytes() == b"rows"


@scenario
async def test_uploads_that_rest_and_files_that_expire_are_removed(folder: Path, files: FileService) -> None:
    started = await files.uploads.begin(ANN, Announced(filename="x", purpose="user_data", size_bytes=4))
    await files.uploads.append(ANN, started.upload.id, 0, b"ab")
    short = await files.uploads.create(ANN, filename="y", purpose="user_data", data=chunks(b"y"), expires_after_s=0.001)
    deadline = time.time() + 0.01
    while time.time() < deadline:
        await asyncio.sleep(0.005)
    await files.collect(min_age_s=-1)
    assert (await files.uploads.upload(ANN, started.upload.id)).upload.state == "expired"
    assert os.listdir(folder / "incoming") == []
    with pytest.raises(ServiceError, match="there is no file"):
        await files.file(ANN, short.id)
    with pytest.raises(ServiceError, match="is expired"):
        await files.uploads.append(ANN, started.upload.id, 2, b"cd")


@scenario
async def test_sizes_and_quotas_refuse_and_leave_nothing(folder: Path, files: FileService) -> None:
    with pytest.raises(ServiceError) as large:
        await files.uploads.create(ANN, filename="x", purpose="user_data", data=chunks(b"x" * 600, b"x" * 600))
    assert large.value.http_status == 413
    with pytest.raises(ServiceError) as quota:
        await files.uploads.create(BEN, filename="x", purpose="user_data", data=chunks(b"x" * 11))
    assert quota.value.reason is Reason.QUOTA_EXCEEDED
    await files.uploads.create(BEN, filename="x", purpose="user_data", data=chunks(b"x" * 6))
    with pytest.raises(ServiceError, match="of which 6 are used"):
        await files.uploads.begin(BEN, Announced(filename="x", purpose="user_data", size_bytes=5))
    assert os.listdir(folder / "incoming") == []
    assert len(blobs(folder)) == 1


@scenario
async def test_files_are_seen_by_their_owner_only(folder: Path, files: FileService) -> None:
    file = await files.uploads.create(ANN, filename="x", purpose="user_data", data=chunks(b"x"))
    for call in (files.file, files.delete):
        with pytest.raises(ServiceError, match="there is no file"):
            await call(BEN, file.id)
    assert await files.files(BEN, limit=10) == []


@scenario
async def test_names_are_for_people_only(folder: Path, files: FileService) -> None:
    for name in ("../x", "a/b", "a\\b", "", "x" * 256, "new\nline"):
        with pytest.raises(ServiceError, match="a file's name has"):
            await files.uploads.begin(ANN, Announced(filename=name, purpose="user_data", size_bytes=1))


def test_a_running_daemon_drops_an_upload_that_went_quiet(tmp_path: Path) -> None:
    """`collect_every_s` and `upload_expiry_s` in a real process."""
    settings = "[files]\ncollect_every_s = 0.1\nupload_expiry_s = 1.0\n"
    with (
        DaemonProcess(tmp_path / "data", settings=settings) as daemon,
        RpcClient(daemon.grpc_address, daemon.key) as rpc,
    ):
        incoming = daemon.data_dir / "incoming"
        begun = files_pb2.CreateUploadRequest(
            filename="quiet.bin", purpose=files_pb2.FILE_PURPOSE_ADAPTER, size_bytes=8, sha256="0" * 64
        )
        upload_id = rpc.call("FileService", "CreateUpload", begun).upload.id
        chunk = files_pb2.UploadChunkRequest(upload_id=upload_id, offset_bytes=0, data=b"half")
        rpc.call("FileService", "UploadChunk", chunk)
        until(lambda: not list(incoming.iterdir()), "the bytes of the upload")
        until(lambda: f"upload {upload_id}: nothing arrived for too long; dropped" in daemon.log, "its line")
        with pytest.raises(grpc.RpcError) as told:
            rpc.call("FileService", "UploadChunk", chunk)
        assert "is expired" in str(told.value)
