"""A small process above the daemon (`gym serve --keep-running`): it holds the HTTP socket and starts the daemon anew.

What systemd does with a socket unit, for where there is no systemd: connections that come while a dead daemon is
replaced wait in the socket's queue instead of being refused. It reads no byte of them, and knows nothing but how to
start the daemon, so there is little in it that can fail.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time

from gym_serve.listening import BACKLOG, FIRST_DESCRIPTOR, listen

logger: logging.Logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LARGEST_DELAY_S = 5.0
SETTLED_S = 10.0
"""A daemon that lived for so long is started again at once."""
USER_MISTAKE = 2
"""The exit code of what starting again does not mend."""
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def keep_running(host: str, port: int) -> int:
    """Runs this very command as a daemon on an inherited socket, again whenever it dies; returns its exit code.

    SIGTERM, SIGINT and SIGHUP are passed on as SIGTERM: the daemon drains, and both end. Raises UserError for an
    address that cannot be listened on.
    """
    signals = {signal.SIGCHLD, *_ENDS}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    sock = listen(host, port)
    sock.listen(BACKLOG)
    delay_s = 0.0
    while True:
        started = time.monotonic()
        pid = _start(sock)
        status, stopped = _wait(pid, signals)
        code = os.waitstatus_to_exitcode(status)
        if stopped or code in (0, USER_MISTAKE):
            return max(code, 0)
        settled = time.monotonic() - started > SETTLED_S
        delay_s = 0.0 if settled else min(LARGEST_DELAY_S, max(FIRST_DELAY_S, 2 * delay_s))
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        logger.error("the daemon %s and is started again in %.1f s; connections wait", how, delay_s)
        if signal.sigtimedwait(_ENDS, delay_s) is not None:
            return 0


def _wait(pid: int, signals: set[signal.Signals]) -> tuple[int, bool]:
    """The child's status, and whether it was told to end."""
    stopped = False
    while True:
        if signal.sigwait(signals) != signal.SIGCHLD:
            stopped = True
            os.kill(pid, signal.SIGTERM)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, stopped


def _start(sock: socket.socket) -> int:
    """A daemon that inherits the socket. Forked by hand: `LISTEN_PID` names a process that must exist to be named."""
    libc = ctypes.CDLL(None)
    command = [sys.executable, *sys.orig_argv[1:]]
    pid = os.fork()
    if pid:
        return pid
    try:
        # Without its keeper it would hold the data directory against the next one.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        os.dup2(sock.fileno(), FIRST_DESCRIPTOR)
        os.set_inheritable(FIRST_DESCRIPTOR, True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(command[0], command, os.environ | {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
    finally:
        os._exit(1)
