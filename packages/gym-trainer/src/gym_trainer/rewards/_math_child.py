"""The process behind the mathematical reward: one JSON request a line in, one JSON reply a line out."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def parse_answer(text: str) -> list[Any]:
    """What math-verify finds in a text, without its own time limit (the parent has one)."""
    from math_verify import parse

    # `#### 42` is how GSM8K marks the answer at the end of a solution.
    return parse(text.rsplit("####", 1)[-1], parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def parse_reference(text: str) -> list[Any]:
    """A reference is often bare LaTeX; it is tried inside math mode first, where that has an effect."""
    bare = text.rsplit("####", 1)[-1].strip()
    inside = parse_answer(bare) if "$" in bare or "\\boxed" in bare else parse_answer(f"${bare}$")
    return inside or parse_answer(bare)


def handle(request: dict[str, str]) -> Any:
    from math_verify import verify

    if request["do"] == "read":
        found = parse_reference(request["reference"]) if "reference" in request else parse_answer(request["answer"])
        return str(found[0]) if found else None
    found = parse_answer(request["answer"])
    expected = parse_reference(request["reference"])
    return bool(found and expected and verify(expected, found, timeout_seconds=None))


def main() -> None:
    # Loaded before the first request, so that no request waits for it.
    importlib.import_module("math_verify")
    sys.stdin.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        try:
            reply = {"value": handle(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - whatever a computer algebra system raises is reported, not lost
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
