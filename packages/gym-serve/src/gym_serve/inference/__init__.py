"""From messages to token ids and back: prompts, text pieces, stop strings, reasoning, tool calls, usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_serve.inference.answers import AnswerStream, Delta, TokenLogprob, Usage
    from gym_serve.inference.chat import ChatModel
    from gym_serve.inference.requests import ChatRequest, CompletionRequest, ResponseFormat

_HOMES = {
    "AnswerStream": "answers",
    "Delta": "answers",
    "TokenLogprob": "answers",
    "Usage": "answers",
    "ChatModel": "chat",
    "ChatRequest": "requests",
    "CompletionRequest": "requests",
    "ResponseFormat": "requests",
}

__all__ = [
    "AnswerStream",
    "ChatModel",
    "ChatRequest",
    "CompletionRequest",
    "Delta",
    "ResponseFormat",
    "TokenLogprob",
    "Usage",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
