"""Guards TLS by config: HTTP and gRPC speak it with one certificate, and plain text is refused."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest
from daemon_process import DaemonProcess
from model_folder import write_model

from gym_sdk._proto.gym.v1 import server_pb2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_http_and_grpc_speak_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    settings = f'[server]\ntls_certificate = "{certificate}"\ntls_key = "{key}"\n'
    with DaemonProcess(tmp_path / "data", str(write_model(tmp_path / "tiny")), settings=settings) as daemon:
        assert daemon.http_url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=daemon.http_url, verify=context) as http:
            assert http.get("/healthz").status_code == 200
            assert http.get("/v1/models", headers={"authorization": f"Bearer {daemon.key}"}).status_code == 200
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(daemon.grpc_address, credentials) as channel:
            call = channel.unary_unary(
                "/gym.v1.ServerService/GetServerInfo",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=server_pb2.GetServerInfoResponse.FromString,
            )
            info = call(
                server_pb2.GetServerInfoRequest(), metadata=[("authorization", f"Bearer {daemon.key}")], timeout=20
            )
            assert info.http_url == daemon.http_url
        with pytest.raises(httpx.HTTPError):
            httpx.get(daemon.http_url.replace("https://", "http://") + "/healthz")
