"""`gym chat` with a run of training-free GRPO: its student's endpoint, behind the library that the run has learned.

The model that was improved answered at an endpoint, so that is where it is asked, with the library in the place that it
had in training. Where that endpoint was on this machine and nothing listens there now, the run's model is loaded here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gym_data.experience import LIBRARY_FILE, ExperienceLibrary, read_library
from gym_sdk.cli.chat import ChatBackend, OpenAIBackend
from gym_sdk.client.settings import local_key_for
from gym_sdk.errors import UserError
from gym_sdk.rundir import RunDir
from gym_sdk.spec import TrainingFreeGrpo, load_spec

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONNECT_S = 2.0


class ExperienceChat:
    """A backend with a library in front of it; see `gym_sdk.cli.chat.ChatBackend`."""

    def __init__(self, name: str, backend: ChatBackend, library: ExperienceLibrary) -> None:
        self.model: str = name
        self.system: str | None = None
        self._backend = backend
        self._library = library

    def stream(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> Iterator[str]:
        """The answer in pieces."""
        return self._backend.stream(
            self._library.place(messages), temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
        )

    def close(self) -> None:
        """Give the connection up."""
        self._backend.close()


def open_experience_chat(target: str) -> ExperienceChat | None:
    """The endpoint of a training-free run, if `target` is one and the endpoint is elsewhere or listens here."""
    path = Path(target).expanduser()
    if not (path / "run.json").is_file():
        return None
    run = RunDir.open(path)
    if not (run.experience_dir / LIBRARY_FILE).is_file():
        return None
    spec = load_spec(run.spec_path)
    if not isinstance(spec.method, TrainingFreeGrpo):
        return None
    student = spec.method.student
    address = urlsplit(student.base_url)
    is_here = address.hostname in LOOPBACK
    if is_here and not _listens(address.hostname or "", address.port or (443 if address.scheme == "https" else 80)):
        return None
    variable = student.api_key_env or ("GYM_API_KEY" if is_here else None)
    key = os.environ.get(variable, "").strip() if variable else ""
    if is_here and student.api_key_env is None:
        key = key or local_key_for(student.base_url) or ""
    if student.api_key_env and not key:
        raise UserError(f"the environment has no {student.api_key_env}, which holds the key of {student.base_url}")
    backend = OpenAIBackend(student.base_url, student.model or spec.model.source, key)
    return ExperienceChat(run.path.name, backend, read_library(run.experience_dir))


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
