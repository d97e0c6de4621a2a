"""`gym chat`: talk to a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from gym_sdk.cli import console
from gym_sdk.cli._chat_backends import (
    ChatBackend,
    DaemonBackend,
    OpenAIBackend,
    Turn,
    is_local,
    key_from,
    open_local,
)
from gym_sdk.cli._connection import Connection, ConnectionOptions
from gym_sdk.client import Gym
from gym_sdk.errors import GymError, UserError

__all__ = ["ChatBackend", "OpenAIBackend", "chat"]

COMMANDS = "/reset begins anew, /quit or Ctrl-D ends, Ctrl-C ends an answer"


@dataclass
class Conversation:
    """A chat with its turns so far."""

    backend: ChatBackend
    system: str | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    seed: int | None
    turns: list[Turn] = field(default_factory=list[Turn])

    def reset(self) -> None:
        """Forget every turn."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Say something; gives the answer in pieces. An answer that was broken off counts as far as it came."""
        self.turns.append({"role": "user", "content": text})
        system: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        pieces: list[str] = []
        try:
            for piece in self.backend.stream(
                [*system, *self.turns],
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=self.max_tokens,
                seed=self.seed,
            ):
                pieces.append(piece)
                yield piece
        except GymError:
            # The question that could not be answered is not part of the chat.
            self.turns.pop()
            raise
        finally:
            if pieces:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})


def chat(
    target: str,
    message: str | None = None,
    /,
    *,
    model: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int = 1024,
    seed: int | None = None,
    api_key_env: str | None = None,
    connection: ConnectionOptions = None,
) -> None:
    """Talk to a model: of a daemon, at any OpenAI-compatible address, or on this machine.

    Parameters
    ----------
    target
        A model of the daemon (its id or alias); an address such as http://host:8000/v1; or a run, folder, .gguf file
        or package:module/file.gguf on this machine.
    message
        Ask this, print the answer, and end. A chat when left out; what comes on standard input when that is no
        terminal.
    model
        Which model, where the target is an address that has several.
    system
        The system message; '' for none. When left out, the one with which every row of a run's training began.
    temperature
        0 always takes the likeliest token.
    top_p
        Draw from the likeliest tokens that together have this probability.
    max_tokens
        The longest answer, in tokens.
    seed
        Draw the same tokens again.
    api_key_env
        The environment variable that holds the key for an address.
    """
    backend = _open(target, model, api_key_env, connection or Connection())
    try:
        if system is None and backend.system is not None:
            system = backend.system
            console.err(f"with the system message of its training (--system TEXT for another): {system}")
        conversation = Conversation(
            backend=backend, system=system, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
        )
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.read().strip()
            if not message:
                raise UserError("nothing was asked: the message and standard input are empty")
        if message is not None:
            _answer(conversation, message)
        else:
            _converse(conversation)
    finally:
        backend.close()


def _open(target: str, model: str | None, api_key_env: str | None, connection: Connection) -> ChatBackend:
    if target.startswith(("http://", "https://")):
        return OpenAIBackend(target, model, key_from(api_key_env))
    if model is not None or api_key_env is not None:
        raise UserError(
            "--model and --api-key-env go with an address", hint="gym chat http://host:8000/v1 --model NAME"
        )
    if is_local(target):
        return open_local(target)
    return DaemonBackend(Gym(connection.base_url, profile=connection.profile), target)


def _answer(conversation: Conversation, text: str) -> None:
    for piece in conversation.ask(text):
        sys.stdout.write(piece)
        sys.stdout.flush()
    console.out()


def _converse(conversation: Conversation) -> None:
    _use_line_editing()
    console.err(f"{conversation.backend.model}: {COMMANDS}")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            console.err()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            conversation.reset()
            console.err("begun anew")
        elif text.startswith("/"):
            console.err(COMMANDS)
        elif text:
            try:
                _answer(conversation, text)
            except KeyboardInterrupt:
                console.err(" (ended)")
            except GymError as error:
                # One failed answer must not end the chat.
                console.err(f"error: {error}")


def _use_line_editing() -> None:
    try:
        # Importing it is what gives `input` history and editing; Windows has its own.
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return
