"""The HTTP side's listening sockets: opened here, or inherited from whoever keeps them open while the daemon restarts.

Inherited sockets follow systemd's protocol (sd_listen_fds(3)): `LISTEN_FDS` of them from descriptor 3 on, meant for the
process `LISTEN_PID`. A connection that comes while no daemon runs waits in the socket's queue.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping

from gym_sdk.errors import UserError

BACKLOG = 2048
"""Connections that may wait for a daemon that starts; the kernel's own limit (net.core.somaxconn) goes before it."""
FIRST_DESCRIPTOR = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises UserError for an address that is none or taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The protocol is named because only then does asyncio switch Nagle's algorithm off, which holds a token back
        # until the client has acknowledged the one before: up to 40 ms.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except socket.gaierror as error:
        raise UserError(f"{host} is no address of this machine: {error.strerror}", hint="--host 127.0.0.1") from None
    except OSError:
        raise port_taken(host, port, "--port") from None
    return sock


def are_inherited(environment: MutableMapping[str, str]) -> bool:
    """Whether sockets were handed to this process."""
    return environment.get("LISTEN_PID") == str(os.getpid()) and environment.get("LISTEN_FDS", "0") != "0"


def take_inherited(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets that were handed to this process; none where nobody did.

    Takes the variables out of `environment`, so that no child believes them to be meant for it. Raises UserError for
    anything but listening TCP sockets: gRPC cannot take a socket over, and opens its own port.
    """
    meant = are_inherited(environment)
    count = environment.get("LISTEN_FDS", "0")
    for name in _VARIABLES:
        environment.pop(name, None)
    if not meant:
        return []
    if not count.isdecimal():
        raise UserError(f"LISTEN_FDS is {count!r}, and should be a number of sockets")
    return [_adopt(descriptor) for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))]


def _adopt(descriptor: int) -> socket.socket:
    hint = "the socket unit has one ListenStream=ADDRESS:PORT for HTTP, and no other sockets"
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise UserError(f"descriptor {descriptor} is no socket: {error.strerror}", hint=hint) from None
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM or not listens:
        raise UserError(f"descriptor {descriptor} is no listening TCP socket", hint=hint)
    return sock


def port_taken(host: str, port: int, option: str) -> UserError:
    """The refusal of a port."""
    return UserError(
        f"port {port} of {host} is in use, or may not be used", hint=f"{option} takes another one; 0 finds a free one"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """`host:port`, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
