"""`gym chat` with a run, an adapter or a model on this machine, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from gym_data.record import Message, text_message
from gym_sdk.cli import console
from gym_sdk.cli.chat import ChatBackend
from gym_sdk.errors import ModelError
from gym_serve.inference.experience_chat import open_experience_chat
from gym_serve.libraries import quieten_libraries
from gym_serve.models.load import load_model
from gym_serve.models.target import ServeTarget, open_target

if TYPE_CHECKING:
    from gym_serve.inference.chat import ChatModel


def open_chat(target: str) -> ChatBackend:
    """Load what `target` names (see `gym_serve.models.target`) and return something to talk to. A run of training-free
    GRPO is asked where its model answers (see `gym_serve.inference.experience_chat`).

    Raises:
        ModelError: there is nothing to load, or it cannot be loaded.
        MissingExtra: torch is not installed.
    """
    if (elsewhere := open_experience_chat(target)) is not None:
        return elsewhere
    quieten_libraries()
    with ConsoleProgress() as progress:
        found = open_target(target, on_progress=progress)
    console.err(f"loading {found.name}")
    return LocalChat(found)


class LocalChat:
    """A loaded model that answers; see `gym_sdk.cli.chat.ChatBackend`."""

    def __init__(self, target: ServeTarget) -> None:
        self.model: str = target.name
        self.system: str | None = target.system
        self._served = _load(target)

    def stream(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> Iterator[str]:
        """The answer in pieces of whole characters, reasoning included as the model wrote it."""
        from gym_serve.inference.requests import ChatRequest

        given = {"temperature": temperature, "top_p": top_p, "seed": seed}
        request = ChatRequest(
            messages=[_message(turn) for turn in messages],
            sampling={name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
        )
        for delta in self._served.chat(request):
            if delta.reasoning or delta.text:
                yield delta.reasoning + delta.text

    def close(self) -> None:
        """Give the memory back."""
        self._served.engine.close()


def _load(target: ServeTarget) -> ChatModel:
    device = _device()
    model = load_model(target.base, device=device)
    if target.adapter is not None:
        from gym_serve.models.adapters import load_adapter

        # On the model itself rather than in the engine's bank: any kind of adapter that peft knows works so.
        model = load_adapter(model, target.adapter)
    from gym_serve.engines.transformers import TransformersEngine
    from gym_serve.inference.chat import ChatModel

    engine = TransformersEngine(model, max_slots=1)
    try:
        chat_model = ChatModel(engine, target.base.folder, adapter_folder=target.adapter)
        return chat_model if target.experiences is None else chat_model.with_experiences(target.experiences)
    except BaseException:
        engine.close()
        raise


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _message(turn: Mapping[str, str]) -> Message:
    role = turn["role"]
    if role not in ("system", "user", "assistant"):
        raise ModelError(f"a chat has no turns of role {role}")
    return text_message(role, turn["content"])


class ConsoleProgress:
    """A `ProgressCallback` that draws each stage on the terminal."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._bars = ExitStack()
        self._bar: console.Progress | None = None
        self._total: int | None = None

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        if stage != self._stage:
            self._bars.close()
            self._stage = stage
            self._bar = self._bars.enter_context(console.progress(total, unit, stage))
        assert self._bar is not None
        self._bar.update(done, total)

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.__exit__(kind, error, trace)
