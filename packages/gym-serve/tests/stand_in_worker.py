"""The stand-in engine as the engine process of a daemon: `python -m stand_in_worker FD SETTINGS`."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import msgspec
from stand_in_engine import StandInEngine

from gym_data import Tokenizer
from gym_serve.engines.protocol import Connection
from gym_serve.engines.worker import WorkerSettings, serve

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.argv[2], type=WorkerSettings)
    engine = StandInEngine(Tokenizer.from_folder(Path(settings.folder)))
    serve(Connection(socket.socket(fileno=int(sys.argv[1])), engine_side=True), engine)
    engine.close()
