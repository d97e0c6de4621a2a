"""An engine for tests of the daemon: no weights, one token of text a step for every request, and told what to do.

A step takes `STAND_IN_STEP_S`; an idle engine begins one when a request comes, as a real one does.

The prompt's text may hold directives: `say:WORD` answers WORD (else: the adapter's own word, else `base`), `tokens:N`
answers N words `0 1 2 ...`, `digest` answers `prompt_digest` of the prompt's ids, `crash` fails the whole engine,
`hang` never ends; `cached:N` says that N tokens of the prompt were read before.
Tokens are the bytes of a byte-level tokenizer (see `model_folder`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gym_data import Tokenizer
from gym_serve.engines.base import (
    EngineError,
    EngineStats,
    Finish,
    GenerationRequest,
    PromptRead,
    StreamItem,
    Token,
    TokenStream,
    check_adapter,
    check_request,
)
from gym_serve.engines.remote import RemoteEngine
from gym_serve.engines.worker import WorkerSettings
from gym_serve.models import ResolvedModel
from gym_serve.settings import EngineSettings

STEP_S = float(os.environ.get("STAND_IN_STEP_S", "0.002"))


def prompt_digest(ids: Sequence[int]) -> str:
    """Short text that stands for a prompt's ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def start(model: ResolvedModel, settings: EngineSettings) -> StandInEngine:
    """The factory that `engine.kind` names."""
    if (model.folder / "refuse-to-load").exists():
        raise EngineError("there is not enough memory for this model")
    (model.folder / "device").write_text(settings.device, encoding="utf-8")
    return StandInEngine(Tokenizer.from_folder(model.folder))


def start_process(model: ResolvedModel, settings: EngineSettings) -> RemoteEngine:
    """The factory of the same engine in a process of its own (`stand_in_worker`)."""
    return RemoteEngine(WorkerSettings(folder=str(model.folder)), worker="stand_in_worker")


class StandInEngine:
    """See the module."""

    context_length = 4096
    vocab_size = 259

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, str] = {}
        self._open: dict[str, tuple[TokenStream, list[int], int]] = {}
        self._lock = threading.Condition()
        self._counts = {"prompt": 0, "generated": 0, "steps": 0}
        self._failed = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return self._failed

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._words)

    def submit(self, request: GenerationRequest) -> TokenStream:
        check_request(request, context_length=self.context_length, vocab_size=self.vocab_size)
        check_adapter(request.adapter, self._words)
        if self._failed:
            raise EngineError("the stand-in has crashed")
        stream = TokenStream(request, self.abort)
        ids = self._answer(request)
        if match := re.search(r"cached:(\d+)", self._tokenizer.decode(list(request.prompt_ids))):
            stream.put([PromptRead(int(match.group(1)))])
        with self._lock:
            self._open[request.id] = (stream, ids, 0)
            self._counts["prompt"] += len(request.prompt_ids)
            self._lock.notify()
        return stream

    def _answer(self, request: GenerationRequest) -> list[int]:
        text = self._tokenizer.decode(list(request.prompt_ids)).rpartition("user\n")[2]
        if "crash" in text:
            return [-1]
        word = "base" if request.adapter is None else self._words[request.adapter]
        if match := re.search(r"tokens:(\d+)", text):
            answer = [self._tokenizer.encode("x")[0]] * int(match.group(1))
        elif "digest" in text:
            answer = self._tokenizer.encode(prompt_digest(request.prompt_ids))
        elif "hang" in text:
            answer = [self._tokenizer.encode("x")[0]] * 100_000
        else:
            match = re.search(r"say:([^\s<]+)", text)
            answer = self._tokenizer.encode(match.group(1) if match else word)
        return [*answer, *sorted(request.stop_ids)[:1]]

    def abort(self, request_id: str) -> None:
        with self._lock:
            found = self._open.pop(request_id, None)
        if found is not None:
            found[0].put([Finish("abort", len(found[0].request.prompt_ids), found[2])])

    def load_adapter(self, folder: Path) -> str:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        self._words[folder.name] = config["word"]
        return folder.name

    def unload_adapter(self, adapter: str) -> None:
        self._words.pop(adapter, None)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._open),
            num_prompt_tokens=self._counts["prompt"],
            num_generated_tokens=self._counts["generated"],
            num_steps=self._counts["steps"],
        )

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()
        for request_id in list(self._open):
            self.abort(request_id)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._open or self._closing)
            if self._closing:
                return
            time.sleep(STEP_S)
            with self._lock:
                items = list(self._open.items())
                if any(ids == [-1] for _, (_, ids, _) in items):
                    self._failed = True
                    self._open.clear()
            if self._failed:
                for _, (stream, _, _) in items:
                    stream.put([EngineError("the stand-in has crashed")])
                return
            for request_id, (stream, ids, done) in items:
                self._step(request_id, stream, ids, done)
            self._counts["steps"] += bool(items)

    def _step(self, request_id: str, stream: TokenStream, ids: list[int], done: int) -> None:
        request = stream.request
        token_id = ids[done]
        done += 1
        logprob = -0.5 if request.top_logprobs is not None else None
        out: list[StreamItem] = [Token(token_id, logprob, ((token_id, -0.5),) if request.top_logprobs else ())]
        ended = token_id in request.stop_ids or done == request.max_tokens
        if ended:
            reason = "stop" if token_id in request.stop_ids else "length"
            out.append(Finish(reason, len(request.prompt_ids), done))
        with self._lock:
            if request_id not in self._open:
                return  # aborted meanwhile
            if ended:
                del self._open[request_id]
            else:
                self._open[request_id] = (stream, ids, done)
            self._counts["generated"] += 1
        stream.put(out)
