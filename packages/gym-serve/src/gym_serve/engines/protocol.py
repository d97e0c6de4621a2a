"""What the API process and the engine process say to each other.

The two share one connected Unix socket. A frame is its length in four little-endian bytes and that many bytes of
MessagePack: an array whose first element names the message. The API process may send `Submit`, `Abort`, `LoadAdapter`,
`UnloadAdapter` and `Close`; the engine process `Ready` (once, first), then `Events` and `Reply`. Events of one step
travel in one frame, in order for each request. Either side takes the end of the connection for the other's death.

Both sides come from one installation, so there is no version to negotiate.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Literal

import msgspec

from gym_serve.engines.base import EngineStats, Finish, GenerationRequest, SamplingParams, Token

MAX_FRAME_BYTES = 64 * 1024 * 1024


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class Submit(_Message, frozen=True):
    """A request. The fields are those of GenerationRequest and SamplingParams."""

    id: str
    prompt_ids: list[int]
    max_tokens: int | None
    stop_ids: list[int]
    adapter: str | None
    sampling: Mapping[str, object]
    top_logprobs: int | None
    grammar: str | None

    @classmethod
    def of(cls, request: GenerationRequest) -> Submit:
        """A request as it travels."""
        sampling = request.sampling
        values = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
        values["logit_bias"] = list(sampling.logit_bias.items())
        return cls(
            request.id,
            list(request.prompt_ids),
            request.max_tokens,
            sorted(request.stop_ids),
            request.adapter,
            values,
            request.top_logprobs,
            request.grammar,
        )

    def request(self) -> GenerationRequest:
        """The request that was sent."""
        values = dict(self.sampling)
        values["logit_bias"] = {int(id_): float(bias) for id_, bias in values["logit_bias"]}  # type: ignore[union-attr]
        return GenerationRequest(
            id=self.id,
            prompt_ids=self.prompt_ids,
            max_tokens=self.max_tokens,
            stop_ids=frozenset(self.stop_ids),
            adapter=self.adapter,
            sampling=SamplingParams(**values),  # type: ignore[arg-type]
            top_logprobs=self.top_logprobs,
            grammar=self.grammar,
        )


class Abort(_Message, frozen=True):
    """End a request."""

    id: str


class LoadAdapter(_Message, frozen=True):
    """Load the adapter in a folder; the reply has its content id."""

    call: int
    folder: str


class UnloadAdapter(_Message, frozen=True):
    """Forget an adapter once it is no longer used."""

    call: int
    adapter: str


class Close(_Message, frozen=True):
    """End everything and exit."""


class Ready(_Message, frozen=True):
    """The model is loaded."""

    context_length: int
    vocab_size: int


class Failure(_Message, frozen=True):
    """An error: whose fault, and the words for it."""

    kind: Literal["user", "model", "engine"]
    message: str
    hint: str | None


TokenTuple = tuple[int, float | None, list[tuple[int, float]]]


class Event(_Message, frozen=True):
    """What happened to one request: new tokens, how much of its prompt was not read again, then perhaps its end."""

    id: str
    tokens: list[TokenTuple]
    num_cached_tokens: int | None = None
    finish: tuple[str, int, int] | None = None
    failure: Failure | None = None


class Events(_Message, frozen=True):
    """What has happened since the last frame, and how the engine stands."""

    events: list[Event]
    stats: Mapping[str, int]


class Reply(_Message, frozen=True):
    """The answer to a call."""

    call: int
    value: str | None
    failure: Failure | None = None


ToEngine = Submit | Abort | LoadAdapter | UnloadAdapter | Close
FromEngine = Ready | Events | Reply | Failure

_encoder = msgspec.msgpack.Encoder()
_decode_to_engine = msgspec.msgpack.Decoder(ToEngine)
_decode_from_engine = msgspec.msgpack.Decoder(FromEngine)


class Connection:
    """One end of the socket. `send` may be called from any thread that holds its own lock; `receive` from one."""

    def __init__(self, end: socket.socket, *, engine_side: bool) -> None:
        self._socket = end
        self._decoder = _decode_to_engine if engine_side else _decode_from_engine

    def send(self, message: _Message) -> None:
        """Write one frame. Raises OSError when the other side is gone."""
        body = _encoder.encode(message)
        self._socket.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self) -> ToEngine | FromEngine | None:
        """The next message; None when the other side is gone."""
        header = self._read(4)
        if header is None:
            return None
        length = int.from_bytes(header, "little")
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        body = self._read(length)
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = self._socket.recv(min(size, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def stats_of(values: Mapping[str, int]) -> EngineStats:
    """Counts as they travelled."""
    return EngineStats(**values)


def token_of(value: TokenTuple) -> Token:
    """A token as it travelled."""
    return Token(value[0], value[1], tuple((id_, logprob) for id_, logprob in value[2]))


def finish_of(value: tuple[str, int, int]) -> Finish:
    """An end as it travelled."""
    return Finish(value[0], value[1], value[2])  # type: ignore[arg-type]
