"""gym.v1 over gRPC, with grpc.health.v1 and reflection."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue] - made at import
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server
from grpc_status import rpc_status

from gym_sdk.client import SERVER_OPTIONS
from gym_serve.auth import Key, Keyring
from gym_serve.call import Call
from gym_serve.errors import Reason, ServiceError, as_service_error
from gym_serve.grpc.dispatch import Method
from gym_serve.limits import RateLimiter, StreamLimiter
from gym_serve.logs import audit, request_id
from gym_serve.metrics import Metrics

logger: logging.Logger = logging.getLogger("gym_serve.access")

DOMAIN = "gym"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class GrpcServer:
    """The gRPC side of the daemon."""

    def __init__(
        self,
        methods: Sequence[Method],
        *,
        keyring: Keyring,
        rates: RateLimiter,
        streams: StreamLimiter,
        metrics: Metrics,
        max_message_bytes: int,
    ) -> None:
        self._keyring = keyring
        self._rates = rates
        self._streams = streams
        self._metrics = metrics
        # Of an option that is given twice gRPC takes the first.
        sizes = {"grpc.max_receive_message_length": max_message_bytes}
        options = list((dict(SERVER_OPTIONS) | sizes).items())
        self._server = grpc.aio.server(options=options)
        self._health: Any = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        for method in methods:
            services.setdefault(method.service, {})[method.name] = self._handler(method)
        self._names = [*services, HEALTH]
        for name, handlers in services.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        add_ServerReflectionServicer_to_server(
            _Reflection([*self._names, reflection.SERVICE_NAME], self._admit), self._server
        )

    async def start(self, address: str, certificate: tuple[bytes, bytes] | None) -> int:
        """Listens and returns the port. `certificate` is the chain and the key, in PEM."""
        if certificate is None:
            port = self._server.add_insecure_port(address)
        else:
            chain, key = certificate
            port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
        await self._server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 says of the daemon and of each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, and ends those that run after the grace time."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    def _handler(self, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        deserialize = method.request_type.FromString

        async def unary(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Message | None:
            responses = [response async for response in self._run(method, request, context)]
            return responses[0] if responses else None

        async def stream(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Message]:
            async with aclosing(self._run(method, request, context)) as responses:
                async for response in responses:
                    yield response

        if method.streams:
            return grpc.unary_stream_rpc_method_handler(stream, deserialize, _serialize)
        return grpc.unary_unary_rpc_method_handler(unary, deserialize, _serialize)

    async def _run(
        self, method: Method, request: Message, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Message]:
        identity = _identity(context)
        token = request_id.set(identity)
        context.set_trailing_metadata((("x-request-id", identity),))
        started = time.monotonic()
        code = "OK"
        key_name: str | None = None
        try:
            key = await self._admit(context)
            key_name = key.name
            # None without a deadline, whatever the stubs say.
            remaining = cast("float | None", context.time_remaining())
            deadline = None if remaining is None else started + remaining
            call = Call(key=key, request_id=identity, deadline=deadline)
            with self._streams.hold(key) if method.is_long else nullcontext():
                if method.streams:
                    async with aclosing(method.stream(request, call)) as responses:
                        async for response in responses:
                            yield response
                else:
                    yield await method.unary(request, call)
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.RpcError:
            raise
        except Exception as error:
            told = as_service_error(error)
            code = told.reason.terms.grpc_code
            if told.reason is Reason.INTERNAL:
                logger.error("%s failed", method.path, exc_info=error)
            if told.reason is Reason.ADMIN_REQUIRED:
                audit.warning("refused: %s", told.reason, extra={"path": method.path, "key": key_name})
            await _abort(context, told, identity)
        finally:
            seconds = time.monotonic() - started
            self._metrics.requests.labels("grpc", method.path, code).inc()
            self._metrics.request_seconds.labels("grpc", method.path).observe(seconds)
            logger.info("%s %s", method.path, code, extra={"duration_ms": round(seconds * 1000, 1), "key": key_name})
            request_id.reset(token)

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> Key:
        metadata = {str(name).lower(): value for name, value in context.invocation_metadata() or ()}
        authorization = metadata.get("authorization")
        try:
            key = await self._keyring.authenticate(authorization if isinstance(authorization, str) else None)
        except ServiceError as error:
            audit.warning("refused: %s", error.reason, extra={"client": context.peer()})
            raise
        self._rates.take(key)
        return key


class _Reflection(reflection.aio.ReflectionServicer):
    """Reflection, which needs a key as all does."""

    def __init__(self, names: Sequence[str], admit: Callable[[Any], Awaitable[Key]]) -> None:
        super().__init__(names)
        self._admit = admit

    async def ServerReflectionInfo(  # pyright: ignore[reportIncompatibleMethodOverride] - a stream, stubbed as a call
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        """The schema, to who has a key."""
        try:
            await self._admit(context)
        except ServiceError as error:
            await _abort(context, error, _identity(context))
        responses = cast("AsyncIterator[Any]", super().ServerReflectionInfo(request_iterator, context))
        async for response in responses:
            yield response


def rich_status(error: ServiceError) -> status_pb2.Status:
    """A `google.rpc.Status` with ErrorInfo, and BadRequest and RetryInfo where there is something to say in them."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason.name,
            domain=DOMAIN,
            metadata={**error.metadata, **({"hint": error.hint} if error.hint else {})},
        )
    ]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    if error.retry_after_s is not None:
        milliseconds = max(1, round(error.retry_after_s * 1000))
        delay = Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=getattr(grpc.StatusCode, error.reason.terms.grpc_code).value[0], message=error.message
    )
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def _abort(context: Any, error: ServiceError, identity: str) -> None:
    status = rpc_status.to_status(rich_status(error))
    # It would replace what was set before.
    metadata = (*status.trailing_metadata, ("x-request-id", identity))
    await context.abort_with_status(_Status(status.code, status.details, metadata))


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def _identity(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    for name, value in context.invocation_metadata() or ():
        if name.lower() == "x-request-id" and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return f"req_{uuid.uuid4().hex}"


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
