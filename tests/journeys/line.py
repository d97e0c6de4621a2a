"""A line between a client and a daemon that can be cut, and led to a daemon that moved."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Line:
    """Forwards TCP from a port of its own to whichever port `lead_to` named last."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._target: tuple[str, int] | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.bytes_up = self.bytes_down = 0
        self.cut_after_bytes_up: int | None = None
        self.cut_after_bytes_down: int | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port` of the client's end."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def lead_to(self, address: str) -> None:
        """Where new connections go: a `host:port`."""
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """Cut every connection that is open now."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                assert self._target is not None
                server = socket.create_connection(self._target, timeout=10)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                if up:
                    self.bytes_up += len(data)
                    if self.cut_after_bytes_up is not None and self.bytes_up >= self.cut_after_bytes_up:
                        self.cut_after_bytes_up = None
                        self.cut()
                else:
                    self.bytes_down += len(data)
                    if self.cut_after_bytes_down is not None and self.bytes_down >= self.cut_after_bytes_down:
                        self.cut_after_bytes_down = None
                        self.cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        self.cut()
