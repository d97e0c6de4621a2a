"""Guards the wire: a client that knows only the released schema makes its journey with today's daemon.

`proto/released.binpb` holds the schema as it was last released. Its messages are built from that file in a pool of
their own, so nothing of today's stubs is in this client: it sends what an older one would, and reads what it would
see.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_process import DaemonProcess
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from rpc_client import RpcClient

RELEASED = Path(__file__).resolve().parents[3] / "proto" / "released.binpb"
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
ROWS = (json.dumps(ROW) + "\n").encode() * 3


def released_schema() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(RELEASED.read_bytes()).file:
        pool.Add(file)  # pyright: ignore[reportUnknownMemberType]
    return pool


class OldClient:
    """Calls by the released schema, or by another one that is given."""

    def __init__(self, address: str, key: str, pool: DescriptorPool | None = None) -> None:
        self.pool = pool or released_schema()
        self.channel = grpc.insecure_channel(address)
        self._metadata = [("authorization", f"Bearer {key}")]

    def message(self, name: str, **fields: Any) -> Any:
        return GetMessageClass(self.pool.FindMessageTypeByName(f"gym.v1.{name}"))(**fields)

    def value(self, enum: str, name: str) -> int:
        return self.pool.FindEnumTypeByName(f"gym.v1.{enum}").values_by_name[name].number

    def call(self, service: str, method: str, **fields: Any) -> Any:
        descriptor = self.pool.FindServiceByName(f"gym.v1.{service}").methods_by_name[method]
        kind = self.channel.unary_stream if descriptor.server_streaming else self.channel.unary_unary
        function = kind(
            f"/gym.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(descriptor.output_type).FromString,
        )
        request = GetMessageClass(descriptor.input_type)(**fields)
        return function(request, metadata=self._metadata, timeout=60)


@pytest.fixture
def old(shared_daemon: DaemonProcess) -> Iterator[OldClient]:
    client = OldClient(shared_daemon.grpc_address, shared_daemon.key)
    yield client
    client.channel.close()


def test_an_older_client_makes_the_whole_journey(old: OldClient) -> None:
    digest = hashlib.sha256(ROWS).hexdigest()
    purpose = old.value("FilePurpose", "FILE_PURPOSE_DATASET")
    created = old.call(
        "FileService", "CreateUpload", filename="rows.jsonl", purpose=purpose, size_bytes=len(ROWS), sha256=digest
    )
    if created.WhichOneof("result") == "file":
        file = created.file
    else:
        old.call("FileService", "UploadChunk", upload_id=created.upload.id, offset_bytes=0, data=ROWS)
        file = old.call("FileService", "CompleteUpload", upload_id=created.upload.id).file
    assert (file.sha256, file.dataset.num_rows) == (digest, 3)

    spec = {"name": "steps-3", "model": {"source": "tiny"}, "data": {"train": [{"source": f"file:{file.id}"}]}}
    job = old.call("JobService", "CreateJob", spec_json=json.dumps(spec), spec_version=1).job
    events = [event for answer in old.call("JobService", "WatchJobEvents", job_id=job.id) for event in answer.events]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[-1].job_state.state == old.value("JobState", "JOB_STATE_SUCCEEDED")
    job = old.call("JobService", "GetJob", job_id=job.id).job
    model = old.call("ModelService", "GetModel", model_id=job.model_id).model
    assert (model.kind, model.base_model_id) == (old.value("ModelKind", "MODEL_KIND_ADAPTER"), "tiny")

    chat = {"model": job.model_id, "messages": [old.message("ChatMessage", role=3, parts=[{"text": "who are you"}])]}
    answer = old.call("InferenceService", "CreateChatCompletion", input=chat)
    assert answer.choices[0].message.parts[0].text == "tuned"
    pieces = list(old.call("InferenceService", "StreamChatCompletion", input=chat))
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == "tuned"
    assert pieces[-1].usage == answer.usage

    artifacts = old.call("JobService", "ListJobArtifacts", job_id=job.id).artifacts
    weights = next(each for artifact in artifacts for each in artifact.files if each.path.endswith(".safetensors"))
    first, *rest = old.call("FileService", "DownloadFile", file_id=weights.file_id)
    content = b"".join(part.data for part in rest)
    assert hashlib.sha256(content).hexdigest() == weights.sha256 == first.file.sha256
    old.call("JobService", "DeleteJob", job_id=job.id)


def test_every_released_method_is_still_answered(old: OldClient, shared_daemon: DaemonProcess) -> None:
    services = ("FileService", "JobService", "ModelService", "InferenceService", "ServerService", "KeyService")
    codes: dict[str, grpc.StatusCode] = {}
    for service in services:
        for method in old.pool.FindServiceByName(f"gym.v1.{service}").methods:
            codes[method.name] = grpc.StatusCode.OK
            try:
                answer = old.call(service, method.name)
                if method.server_streaming:
                    list(answer)
            except grpc.RpcError as error:
                codes[method.name] = error.code()  # type: ignore[attr-defined]
    assert len(codes) > 35
    assert not {"UNIMPLEMENTED", "INTERNAL", "UNKNOWN"} & {code.name for code in codes.values()}, codes


def test_a_client_that_knows_nothing_learns_the_calls_by_reflection(shared_daemon: DaemonProcess) -> None:
    """As grpcurl does: names, messages and calls from the server alone."""
    with RpcClient(shared_daemon.grpc_address, shared_daemon.key) as rpc:
        learned = DescriptorPool(rpc.reflected())
        client = OldClient(shared_daemon.grpc_address, shared_daemon.key, learned)
        assert client.call("ServerService", "GetServerInfo").version
        chat = {"model": "tiny", "messages": [client.message("ChatMessage", role=3, parts=[{"text": "say:learned"}])]}
        answer = client.call("InferenceService", "CreateChatCompletion", input=chat)
        assert answer.choices[0].message.parts[0].text == "learned"
        client.channel.close()
