"""Who answers in `gym chat`: a daemon, any OpenAI-compatible address, or a model on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gym_sdk.client import Gym
from gym_sdk.client.chat_types import ChatOptions
from gym_sdk.client.errors import remote_error
from gym_sdk.errors import MissingExtra, UserError, Where
from gym_sdk.rundir import nearby_runs

ENTRY_POINTS = "gym.chat_backends"
QUIET_S = 300.0
"""An answer that says nothing for so long has broken off."""

Turn = Mapping[str, str]
"""`{"role": ..., "content": ...}`."""


class ChatBackend(Protocol):
    """Something that answers.

    Packages give one for models on this machine by an entry point named `local` of the group `gym.chat_backends`:
    a function that takes the target (a run, a folder, a file) and returns a ChatBackend, or raises ModelError.
    """

    @property
    def model(self) -> str:
        """Its name, for people."""
        ...

    @property
    def system(self) -> str | None:
        """The system message with which it was trained, where that is known to be one."""
        ...

    def stream(
        self,
        messages: Sequence[Turn],
        *,
        temperature: float | None,
        top_p: float | None,
        max_tokens: int | None,
        seed: int | None,
    ) -> Iterator[str]:
        """The answer in pieces of whole characters. None is the model's own default. Closing it ends the answer."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


def is_local(target: str) -> bool:
    """Whether a target names something on this machine: ids of a daemon's models have no slashes."""
    return (
        target.startswith(("package:", ".", "~")) or "/" in target or target.endswith(".gguf") or Path(target).exists()
    )


def _local_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS, name="local"))


def open_local(target: str) -> ChatBackend:
    """A model on this machine."""
    points = _local_points()
    if not points:
        raise MissingExtra("chatting with a model on this machine", package="gym-serve", extra="torch")
    path = Path(target).expanduser()
    if not target.startswith("package:") and not path.exists():
        hint = (
            nearby_runs(path.parent) or "gym models list shows what a daemon has; runs are in the folder of output.dir"
        )
        raise UserError("there is no such run, folder or file", where=Where(file=target), hint=hint)
    opened: ChatBackend = points[0].load()(target if target.startswith("package:") else str(path))
    return opened


class DaemonBackend:
    """A model of a daemon."""

    system: str | None = None

    def __init__(self, gym: Gym, model: str) -> None:
        self._gym = gym
        self._model = model

    @property
    def model(self) -> str:
        """Its id or alias."""
        return self._model

    def stream(
        self,
        messages: Sequence[Turn],
        *,
        temperature: float | None,
        top_p: float | None,
        max_tokens: int | None,
        seed: int | None,
    ) -> Iterator[str]:
        """The answer in pieces."""
        options = ChatOptions(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
        with self._gym.chat.stream(self._model, messages, **options) as stream:
            for chunk in stream:
                if chunk.text:
                    yield chunk.text

    def close(self) -> None:
        """Give the connection up."""
        self._gym.close()


class OpenAIBackend:
    """Any address that speaks OpenAI's chat API."""

    system: str | None = None

    def __init__(self, base_url: str, model: str | None, api_key: str) -> None:
        import httpx

        self._httpx = httpx
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(QUIET_S, connect=20.0))
        self._base_url = base_url.rstrip("/")
        self._model = model or self._only_model()

    @property
    def model(self) -> str:
        """The name in its list."""
        return self._model

    def _only_model(self) -> str:
        try:
            response = self._client.get(f"{self._base_url}/models")
            if response.status_code != 200:
                raise _refused(response.status_code, response.content)
            names = [str(model["id"]) for model in response.json()["data"]]
        except (self._httpx.TransportError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._base_url}/models gives no list of models: {error}", hint="name one: --model"
            ) from None
        if len(names) != 1:
            raise UserError(
                f"{self._base_url} has {len(names)} models", hint=f"--model, one of: {', '.join(names[:10])}"
            )
        return names[0]

    def stream(
        self,
        messages: Sequence[Turn],
        *,
        temperature: float | None,
        top_p: float | None,
        max_tokens: int | None,
        seed: int | None,
    ) -> Iterator[str]:
        """The answer in pieces."""
        given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
        body = {
            "model": self._model,
            "messages": [dict(turn) for turn in messages],
            "stream": True,
            **{name: value for name, value in given.items() if value is not None},
        }
        try:
            with self._client.stream("POST", f"{self._base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, response.read())
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if text := _piece(data):
                        yield text
        except self._httpx.TransportError as error:
            raise remote_error("UNAVAILABLE", f"{self._base_url} cannot be reached: {error}") from None

    def close(self) -> None:
        """Give the connections up."""
        self._client.close()


def _piece(data: str) -> str:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise remote_error("INTERNAL", f"not JSON: {data[:100]}") from None
    if error := event.get("error"):
        raise remote_error("INTERNAL", str(error.get("message", error)) if isinstance(error, dict) else str(error))
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def _refused(status: int, content: bytes) -> Exception:
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(content[:200].decode("utf-8", "replace").split())
    codes = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
    code = codes.get(status, "INVALID_ARGUMENT" if 400 <= status < 500 else "INTERNAL")
    return remote_error(code, f"HTTP {status}: {message}")


def key_from(variable: str | None) -> str:
    """The key in an environment variable that the user named. Keys are never sent to an address unasked."""
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise UserError(f"the environment has no {variable}")
    return key
