"""An engine that says what it is told, for tests of what stands above engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gym_serve.engines.base import EngineStats, Finish, GenerationRequest, Token, TokenStream


class ScriptedEngine:
    """Answers every request with the same ids, all at once or as `step` is called."""

    def __init__(self, ids: Sequence[int], *, context_length: int = 1000, stepped: bool = False) -> None:
        self.context_length = context_length
        self.vocab_size = 100_000
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.adapters: frozenset[str] = frozenset()
        self._ids = list(ids)
        self._stepped = stepped
        self._open: dict[str, tuple[TokenStream, list[int]]] = {}

    def submit(self, request: GenerationRequest) -> TokenStream:
        self.requests.append(request)
        stream = TokenStream(request, self.abort)
        self._open[request.id] = (stream, list(self._ids))
        while not self._stepped and request.id in self._open:
            self.step()
        return stream

    def step(self) -> None:
        """One token for every open request."""
        for request_id, (stream, ids) in list(self._open.items()):
            request = stream.request
            token_id = ids.pop(0)
            done = len(self._ids) - len(ids)
            logprob = -0.5 if request.top_logprobs is not None else None
            items: list[Token | Finish] = [
                Token(token_id, logprob, ((token_id, -0.5),) if request.top_logprobs else ())
            ]
            if token_id in request.stop_ids:
                items.append(Finish("stop", len(request.prompt_ids), done))
            elif not ids or done == request.max_tokens:
                items.append(Finish("length", len(request.prompt_ids), done))
            if len(items) == 2:
                del self._open[request_id]
            stream.put(items)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._open:
            stream, ids = self._open.pop(request_id)
            stream.put([Finish("abort", len(stream.request.prompt_ids), len(self._ids) - len(ids))])

    def load_adapter(self, folder: Path) -> str:
        return "sha256:scripted"

    def unload_adapter(self, adapter: str) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._open))

    def close(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)
