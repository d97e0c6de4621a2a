"""Which daemon to call, with which key: argument, then environment, then profile, then this machine's own daemon.

A profile file (`profiles.toml` in `gym_sdk.folders.config_dir()`):

    default = "node"

    [profiles.node]
    base_url = "grpcs://gpu.example.org:50051"
    api_key = "gym-..."
    ca_certificate = "/etc/ssl/our-ca.pem"    # only where the daemon's certificate is signed by a CA of your own

A key is only ever sent to the address that it was given for: a profile's key goes to the profile's address, and this
machine's own key to this machine.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gym_sdk.client._options import local_address_path, local_key_path
from gym_sdk.errors import UserError, Where
from gym_sdk.folders import config_dir

_logger = logging.getLogger(__name__)

LOCAL_URL = "grpc://127.0.0.1:50051"
DEFAULT_PORTS = {"grpc": 50051, "grpcs": 443, "http": 80, "https": 443}
LOOPBACK = re.compile(r"^(localhost|127(\.\d+){3}|::1)$")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where a client calls, and as whom."""

    base_url: str
    """`grpc://host:port`, `grpcs://` with TLS; `http://`, `https://` where gRPC is blocked."""
    api_key: str = ""
    ca_certificate: str = ""
    """A PEM file with the authorities to trust; the system's when empty."""
    origin: str = "argument"
    """Where the address came from, for messages."""

    @property
    def address(self) -> SplitResult:
        """The parts of the address."""
        return urlsplit(self.base_url)

    @property
    def is_http(self) -> bool:
        """Whether calls go over HTTP."""
        return self.address.scheme in ("http", "https")

    @property
    def is_encrypted(self) -> bool:
        """Whether TLS protects the line."""
        return self.address.scheme in ("grpcs", "https")

    @property
    def is_local(self) -> bool:
        """Whether the daemon is on this machine."""
        return self.origin == "default" or LOOPBACK.match(self.address.hostname or "") is not None

    @property
    def target(self) -> str:
        """`host:port`, for gRPC."""
        host = self.address.hostname or ""
        port = self.address.port or DEFAULT_PORTS[self.address.scheme]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def http_root(self) -> str:
        """The address before `/gym.v1.Service/Method`, for HTTP; an OpenAI base URL's `/v1` is left out."""
        return self.base_url.rstrip("/").removesuffix("/v1")


def resolve_settings(
    base_url: str | None = None,
    api_key: str | None = None,
    profile: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    profiles_path: Path | None = None,
) -> Settings:
    """The settings in force. Raises UserError that says which place is wrong."""
    environment = os.environ if environment is None else environment
    path = profiles_path or config_dir() / "profiles.toml"
    wanted = profile or environment.get("GYM_PROFILE") or None
    url = base_url or environment.get("GYM_BASE_URL") or None
    key = api_key or environment.get("GYM_API_KEY") or None
    origin = "argument" if base_url else "GYM_BASE_URL"
    ca_certificate = ""
    if profile is not None or url is None:
        chosen = _read_profile(path, wanted)
        if chosen is not None and url is None:
            name, values = chosen
            url, origin = values["base_url"], f"profile {name}"
            key = key or values.get("api_key")
            ca_certificate = values.get("ca_certificate", "")
    if url is None:
        url, origin = _local_url(), "default"
    settings = Settings(base_url=_checked_url(url, origin), ca_certificate=ca_certificate, origin=origin)
    if key is None and settings.is_local:
        key = _local_key()
    if key and not settings.is_encrypted and not settings.is_local:
        _logger.warning("the API key travels unencrypted to %s; use grpcs:// or https://", settings.address.hostname)
    return Settings(
        base_url=settings.base_url, api_key=(key or "").strip(), ca_certificate=ca_certificate, origin=origin
    )


def _checked_url(url: str, origin: str) -> str:
    full = url if "://" in url else f"grpc://{url}"
    try:
        parts = urlsplit(full)
        good = parts.scheme in DEFAULT_PORTS and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise UserError(
            f"{url!r} (from {origin}) is not a daemon's address",
            hint="addresses look like grpc://host:50051, grpcs://host:50051, http://host:8000 or https://host",
        )
    return full


def _read_profile(path: Path, wanted: str | None) -> tuple[str, dict[str, str]] | None:
    where = Where(file=str(path))
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if wanted is None:
            return None
        raise UserError(f"there is no profile {wanted}: the file does not exist", where=where) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=where) from None
    profiles = data.get("profiles", {})
    name = wanted or data.get("default")
    if name is None:
        return None
    values = profiles.get(name) if isinstance(profiles, dict) else None
    if not isinstance(values, dict):
        known = ", ".join(profiles) if isinstance(profiles, dict) and profiles else "none"
        raise UserError(f"there is no profile {name}", where=where, hint=f"profiles in the file: {known}")
    allowed = ("base_url", "api_key", "ca_certificate")
    for field, value in values.items():
        if field not in allowed or not isinstance(value, str):
            problem = "must be text" if field in allowed else f"unknown key; known keys are {', '.join(allowed)}"
            raise UserError(problem, where=Where(file=str(path), path=f"profiles.{name}.{field}"))
    if "base_url" not in values:
        raise UserError("required: the daemon's address", where=Where(file=str(path), path=f"profiles.{name}.base_url"))
    if "api_key" in values and os.name == "posix" and path.stat().st_mode & 0o077:
        _logger.warning("%s holds a key and can be read by others; chmod 600 it", path)
    return name, values


def _local_url() -> str:
    """Where this machine's own daemon says it listens; the usual place where none has said so."""
    try:
        said: Any = json.loads(local_address_path().read_text(encoding="utf-8"))
        url = str(said["grpc_target"])
        parts = urlsplit(url)
        if parts.scheme in DEFAULT_PORTS and parts.hostname and parts.port:
            # A daemon that listens everywhere is called where it is nearest.
            nearest = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname)
            return f"{parts.scheme}://{nearest}:{parts.port}" if nearest else url
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return LOCAL_URL


def local_key_for(url: str) -> str | None:
    """The key of this machine's own daemon, if `url` is an address of its HTTP interface; None for anything else.

    Any port of a loopback address may belong to somebody else's server, which must not be sent this key.
    """
    try:
        said = urlsplit(str(json.loads(local_address_path().read_text(encoding="utf-8"))["http_url"]))
        asked = urlsplit(url)
        same = (asked.scheme, asked.port) == (said.scheme, said.port)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _local_key() if same and LOOPBACK.match(asked.hostname or "") else None


def _local_key() -> str | None:
    try:
        return local_key_path().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
