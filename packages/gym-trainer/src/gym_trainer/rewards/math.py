"""The mathematical reward: symbolic equivalence by math-verify, in a process of its own.

Model text can hold expressions that keep a computer algebra system busy for hours (`10^{10^{10}}`), and math-verify's
own time limit needs the main thread of a POSIX process. A child that is ended and started again bounds it everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
from typing import Any

from gym_sdk.errors import MissingExtra, RunFailed
from gym_sdk.spec.rewards import MathReward
from gym_trainer.rewards.base import RewardFailed, RewardTimeout

START_TIMEOUT_S = 120.0
"""Importing sympy takes a second on a quick machine and many on a slow disk."""


class Math:
    """1 when the answer equals the reference as mathematics."""

    repeatable = False
    all_or_nothing = True

    def __init__(self, spec: MathReward) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("the math reward", package="gym-trainer", extra="math")
        self._timeout_s = spec.timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def check(self, reference: str) -> str | None:
        if self._ask({"do": "read", "reference": reference}, "the reference") is None:
            return f"the reference {reference[:60]!r} is no mathematical expression"
        return None

    def extract(self, answer: str) -> str | None:
        return self._ask({"do": "read", "answer": answer}, "an answer")

    def score(self, answer: str, reference: str, question: str) -> float:
        return float(self._ask({"do": "verify", "answer": answer, "reference": reference}, "an answer"))

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout):
                if stream is not None:
                    stream.close()
            self._child = None

    def _ask(self, request: dict[str, str], what: str) -> Any:
        if self._child is None:
            self._start()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self.close()
            raise RewardTimeout(f"math-verify took over {self._timeout_s:g} s for {what}") from None
        except OSError:
            line = None
        if line is None:
            self.close()
            raise RewardFailed(f"math-verify's process ended while it verified {what}")
        reply = json.loads(line)
        if "error" in reply:
            raise RewardFailed(f"math-verify failed: {reply['error']}")
        return reply["value"]

    def _start(self) -> None:
        lines: queue.Queue[str | None] = queue.Queue()
        child = subprocess.Popen(
            [sys.executable, "-m", "gym_trainer.rewards._math_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        stdout = child.stdout
        assert stdout is not None

        def read() -> None:
            for line in stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True, name="math-verify").start()
        self._child, self._lines = child, lines
        try:
            ready = lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            ready = None
        if ready is None:
            self.close()
            raise RunFailed("math-verify did not start", hint="python -m gym_trainer.rewards._math_child shows why")
