"""Guards that no request, however strange, is the daemon's own fault: no 500 over HTTP, no INTERNAL over gRPC."""

from __future__ import annotations

import json
import random
import string

import grpc
from daemon_process import DaemonProcess
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rpc_client import RpcClient, all_methods

from gym_serve.daemon import Daemon
from gym_serve.settings import load_settings

ROUNDS = 6
TEXTS = (
    "",
    "tiny",
    "x",
    "\0",
    "é\U0001f600",
    "../../etc/passwd",
    "-1",
    "file:file-0",
    "a" * 3000,
    "{",
    "[]",
    "null",
    "\ud7ff",
)
NUMBERS = (0, 1, 2, 7, 2**31 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"))


def fill(message: Message, chance: random.Random, depth: int = 0) -> Message:
    """Random values in some of a message's fields."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.4:
            continue
        for _ in range(chance.randrange(3) if field.is_repeated else 1):
            set_field(message, field, chance, depth)
    return message


def set_field(message: Message, field: FieldDescriptor, chance: random.Random, depth: int) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.message_type is None:
                target[scalar(key, chance)] = scalar(value, chance)
        elif depth < 4:
            fill(target.add() if field.is_repeated else target, chance, depth + 1)
            if not field.is_repeated:
                target.SetInParent()
    elif field.is_repeated:
        target.append(scalar(field, chance))
    else:
        setattr(message, field.name, scalar(field, chance))


def scalar(field: FieldDescriptor, chance: random.Random) -> object:
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice((b"", b"\xff\0", b"x" * 1000))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return chance.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return chance.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return chance.choice((0, 1, 2, 3, 99))
    return chance.choice(NUMBERS)


def outcome(rpc: RpcClient, service: str, method: str, request: Message, streams: bool) -> grpc.StatusCode:
    """The status of one call."""
    try:
        (rpc.drain if streams else rpc.call)(service, method, request, timeout=2.0)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


def test_no_rpc_is_internal(shared_daemon: DaemonProcess) -> None:
    chance = random.Random(3)
    num_calls = 0
    with RpcClient(shared_daemon.grpc_address, shared_daemon.key) as rpc:
        for _ in range(ROUNDS):
            for service, method, request, streams in all_methods():
                if method in ("DeleteModel", "UnloadModel", "CreateModel", "RevokeKey"):
                    continue  # they would take the other tests' models and keys away
                fill(request, chance)
                num_calls += 1
                code = outcome(rpc, service, method, request, streams)
                assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (method, request)
    assert num_calls > 150


def test_no_http_call_is_a_500(shared_daemon: DaemonProcess, tmp_path) -> None:
    settings = load_settings(None, {"server": {"data_dir": str(tmp_path)}, "engine": {"kind": "stand_in_engine:start"}})
    routes = [(method, route.path) for route in Daemon(settings).http_app().routes for method in route.methods or ()]
    chance = random.Random(5)
    fields = (
        *("model", "messages", "prompt", "stream", "n", "stop", "temperature", "max_tokens", "logit_bias", "tools"),
        *("training_file", "method", "suffix", "seed", "metadata", "bytes", "filename", "purpose", "part_ids", "md5"),
        *("response_format", "tool_choice", "spec_json", "jobId", "specJson", "input"),
    )

    def value(depth: int = 0) -> object:
        kind = chance.randrange(8 if depth < 3 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(chance.randrange(3))]
        if kind >= 6:
            return {chance.choice((*fields, "role", "content", "type")): value(depth + 1) for _ in range(3)}
        return (chance.choice(TEXTS), chance.choice(NUMBERS), None, True, 0.5)[kind]

    with shared_daemon.http() as http:
        http.timeout = 5.0
        for method, path in routes * 3:
            if method == "HEAD" or (method == "DELETE" and "models" in path) or "gym.v1.Model" in path:
                continue
            filled = path
            for name in ("file_id", "upload_id", "job_id", "model_id", "model_id:path"):
                filled = filled.replace(f"{{{name}}}", "".join(chance.choices(string.ascii_letters + "-%._~", k=9)))
            body = json.dumps({name: value() for name in chance.sample(fields, 6)}).encode()
            content = chance.choice((body, b"", b"\xff\xfe", b"[" * 5000, b"null"))
            media = chance.choice(
                (
                    "application/json",
                    "multipart/form-data; boundary=x",
                    "application/proto",
                    "application/connect+proto",
                    "",
                )
            )
            query = chance.choice(("", "?limit=0", "?limit=x&after=y", "?order=z", "?after=ftevent-x-1"))
            response = http.request(
                method, filled + query, content=content if method == "POST" else None, headers={"content-type": media}
            )
            assert response.status_code != 500, (method, filled, content[:300], media, response.text)
