"""The fake daemon over gRPC, and over HTTP/1.1 by the Connect protocol."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc

from gym_sdk._proto.gym.v1 import (
    files_pb2,
    files_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)
from gym_sdk.client import SERVER_OPTIONS
from gym_sdk_fakes.daemon import Daemon
from gym_sdk_fakes.refusal import Code, Refusal

SERVICES = {
    "FileService": (files_pb2.DESCRIPTOR, files_pb2_grpc.add_FileServiceServicer_to_server),
    "JobService": (jobs_pb2.DESCRIPTOR, jobs_pb2_grpc.add_JobServiceServicer_to_server),
    "ModelService": (models_pb2.DESCRIPTOR, models_pb2_grpc.add_ModelServiceServicer_to_server),
    "InferenceService": (inference_pb2.DESCRIPTOR, inference_pb2_grpc.add_InferenceServiceServicer_to_server),
    "ServerService": (server_pb2.DESCRIPTOR, server_pb2_grpc.add_ServerServiceServicer_to_server),
    "KeyService": (server_pb2.DESCRIPTOR, server_pb2_grpc.add_KeyServiceServicer_to_server),
}


def serve_grpc(daemon: Daemon, port: int = 0) -> tuple[grpc.Server, int]:
    """Answer over gRPC; returns the server and its port."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16), options=SERVER_OPTIONS)
    for name, (descriptor, add) in SERVICES.items():
        methods = {}
        for method in descriptor.services_by_name[name].methods:
            methods[method.name] = (
                _stream(daemon, method.name) if method.server_streaming else _unary(daemon, method.name)
            )
        add(type(name, (), methods)(), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> None:
    details = (("grpc-status-details-bin", refusal.status()),) if refusal.details else ()
    context.set_trailing_metadata((*details, ("x-request-id", "req-of-the-daemon")))
    context.abort(refusal.code, refusal.message)


def _unary(daemon: Daemon, method: str) -> Any:
    def call(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return daemon.unary(method, request, dict(context.invocation_metadata()))
        except Refusal as refusal:
            _abort(context, refusal)

    return call


def _stream(daemon: Daemon, method: str) -> Any:
    def call(self: Any, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        messages = daemon.stream(method, request, dict(context.invocation_metadata()))
        try:
            for message in messages:
                if not context.is_active():
                    return
                yield message
        except Refusal as refusal:
            _abort(context, refusal)
        finally:
            messages.close()

    return call


def serve_connect(daemon: Daemon, port: int = 0) -> tuple[ThreadingHTTPServer, int]:
    """Answer over HTTP/1.1 by the Connect protocol; returns the server and its port."""
    methods = {
        f"/gym.v1.{service}/{method.name}": method
        for service, (descriptor, _) in SERVICES.items()
        for method in descriptor.services_by_name[service].methods
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            method = methods[self.path]
            metadata = {name.lower(): value for name, value in self.headers.items()}
            if method.server_streaming:
                self.answer_stream(method, body[5:], metadata)
            else:
                self.answer_unary(method, body, metadata)

        def answer_unary(self, method: Any, body: bytes, metadata: dict[str, str]) -> None:
            assert metadata["content-type"] == "application/proto"
            try:
                request = method.input_type._concrete_class.FromString(body)
                content = daemon.unary(method.name, request, metadata).SerializeToString()
                status, kind = 200, "application/proto"
            except Refusal as refusal:
                content, status, kind = json.dumps(_connect_error(refusal)).encode(), 400, "application/json"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.send_header("x-request-id", "req-of-the-daemon")
            self.end_headers()
            self.wfile.write(content)

        def answer_stream(self, method: Any, body: bytes, metadata: dict[str, str]) -> None:
            assert metadata["content-type"] == "application/connect+proto"
            self.send_response(200)
            self.send_header("content-type", "application/connect+proto")
            self.send_header("transfer-encoding", "chunked")
            self.send_header("x-request-id", "req-of-the-daemon")
            self.end_headers()
            messages = daemon.stream(method.name, method.input_type._concrete_class.FromString(body), metadata)
            end: dict[str, Any] = {}
            try:
                for message in messages:
                    self.envelope(0, message.SerializeToString())
            except Refusal as refusal:
                if refusal.code is Code.UNAVAILABLE and not refusal.details:
                    self.close_connection = True  # the line is cut in the middle
                    return
                end = {"error": _connect_error(refusal)}
            except OSError:
                messages.close()
                self.close_connection = True
                return
            self.envelope(2, json.dumps(end).encode())
            self.wfile.write(b"0\r\n\r\n")

        def envelope(self, flags: int, content: bytes) -> None:
            data = struct.pack(">BI", flags, len(content)) + content
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server, server.server_address[1]


def _connect_error(refusal: Refusal) -> dict[str, Any]:
    name = "canceled" if refusal.code is Code.CANCELLED else refusal.code.name.lower()
    details = [
        {
            "type": detail.DESCRIPTOR.full_name,
            "value": base64.b64encode(detail.SerializeToString()).decode().rstrip("="),
        }
        for detail in refusal.details
    ]
    return {"code": name, "message": refusal.message, "details": details}
