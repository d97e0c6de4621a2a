"""The methods of gym.v1 by their names in the schema, for gRPC and for Connect alike.

A service is an object with a method for each of the schema's: `async def M(request, call) -> response`, or an async
generator for a stream of responses. Both interfaces take their list from the schema's descriptors, so a method that
is not written yet is an error at start, not at the call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from gym_serve.call import Call


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of one service."""

    service: str
    name: str
    request_type: type[Message]
    streams: bool
    """Whether it answers with a stream."""
    function: Callable[[Any, Call], Any]

    @property
    def path(self) -> str:
        """As both interfaces name it."""
        return f"/{self.service}/{self.name}"

    @property
    def is_long(self) -> bool:
        """Whether it may be under way for long, and counts as an open stream."""
        return self.streams or self.service == "gym.v1.InferenceService"

    def unary(self, request: Message, call: Call) -> Awaitable[Message]:
        """Calls a method that answers once."""
        return cast("Awaitable[Message]", self.function(request, call))

    def stream(self, request: Message, call: Call) -> AsyncGenerator[Message]:
        """Calls a method that answers with a stream."""
        return cast("AsyncGenerator[Message]", self.function(request, call))


def methods(file: FileDescriptor, implementations: dict[str, object]) -> Iterator[Method]:
    """Every method of every service of one schema file; `implementations` has an object for each service's name."""
    for service in file.services_by_name.values():
        implementation = implementations[service.name]
        for method in service.methods:
            yield _method(service.full_name, method, implementation)


def _method(service: str, method: MethodDescriptor, implementation: object) -> Method:
    assert not method.client_streaming, "no call of gym.v1 has a client stream: it could not go over HTTP/1.1"
    return Method(
        service=service,
        name=method.name,
        request_type=GetMessageClass(method.input_type),
        streams=method.server_streaming,
        function=getattr(implementation, method.name),
    )
