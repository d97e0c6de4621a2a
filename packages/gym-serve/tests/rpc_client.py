"""A gRPC client that knows only what the server's own reflection and the messages say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from gym_sdk._proto.gym.v1 import (  # noqa: F401 - registers every service
    files_pb2,
    inference_pb2,
    jobs_pb2,
    models_pb2,
    server_pb2,
)
from gym_sdk.client import CHANNEL_OPTIONS

SERVICES = ("FileService", "JobService", "ModelService", "InferenceService", "ServerService", "KeyService")


class RpcClient:
    """`call(service, method, request)`, or `stream(...)`, with a key."""

    def __init__(self, address: str, key: str | None) -> None:
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._metadata = [("authorization", f"Bearer {key}")] if key is not None else []

    def call(self, service: str, method: str, request: Message, timeout: float = 60.0) -> Any:
        descriptor = descriptor_pool.Default().FindServiceByName(f"gym.v1.{service}").methods_by_name[method]
        assert isinstance(request, message_factory.GetMessageClass(descriptor.input_type))
        function = self.channel.unary_unary(
            f"/gym.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(descriptor.output_type).FromString,
        )
        return function(request, metadata=self._metadata, timeout=timeout)

    def stream(self, service: str, method: str, request: Message, timeout: float = 60.0) -> Any:
        descriptor = descriptor_pool.Default().FindServiceByName(f"gym.v1.{service}").methods_by_name[method]
        function = self.channel.unary_stream(
            f"/gym.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(descriptor.output_type).FromString,
        )
        return function(request, metadata=self._metadata, timeout=timeout)

    def drain(self, service: str, method: str, request: Message, timeout: float = 60.0) -> list[Any]:
        """Every response of a stream."""
        return list(self.stream(service, method, request, timeout))

    def reflected(self) -> ProtoReflectionDescriptorDatabase:
        """What the server says of its own schema."""
        channel = grpc.intercept_channel(self.channel, _Metadata(self._metadata))
        return ProtoReflectionDescriptorDatabase(channel)

    def reflect(self) -> list[str]:
        """The services that reflection names."""
        return sorted(self.reflected().get_services())

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()


class _Metadata(grpc.StreamStreamClientInterceptor):
    def __init__(self, metadata: list[tuple[str, str]]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)


def all_methods() -> Iterator[tuple[str, str, Message, bool]]:
    """Every method of every service with an empty request, and whether it streams."""
    pool = descriptor_pool.Default()
    for service in SERVICES:
        for method in pool.FindServiceByName(f"gym.v1.{service}").methods:
            request = message_factory.GetMessageClass(method.input_type)()
            yield service, method.name, request, method.server_streaming


def chat_input(model: str, chat: Sequence[Mapping[str, str]]) -> inference_pb2.ChatCompletionInput:
    """A chat of texts, in the schema's words."""
    return inference_pb2.ChatCompletionInput(
        model=model,
        messages=[
            inference_pb2.ChatMessage(
                role=inference_pb2.ChatRole.Value(f"CHAT_ROLE_{turn['role'].upper()}"),
                parts=[inference_pb2.ContentPart(text=turn["content"])],
            )
            for turn in chat
        ],
    )


def details(error: grpc.RpcError) -> tuple[str, error_details_pb2.ErrorInfo, list[tuple[str, str]]]:
    """The code, ErrorInfo and field violations of a failed call."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, "every error of the daemon is a rich one"
    info = error_details_pb2.ErrorInfo()
    violations: list[tuple[str, str]] = []
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = [(violation.field, violation.description) for violation in bad.field_violations]
    return error.code().name, info, violations  # type: ignore[attr-defined]
