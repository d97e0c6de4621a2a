"""`multipart/form-data` as it comes, so that a file goes to the disk without being held in memory first."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from gym_serve.errors import invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_HEADER_BYTES = 16 * 1024
_MAX_FIELD_BYTES = 64 * 1024
_MAX_PARTS = 64


@dataclass(kw_only=True)
class Part:
    """A field or a file. `data` must be read to its end before the next part is asked for."""

    name: str
    filename: str | None
    data: AsyncIterator[bytes]

    async def text(self) -> str:
        """A short field's value."""
        value = b""
        async for chunk in self.data:
            value += chunk
            if len(value) > _MAX_FIELD_BYTES:
                raise invalid(f"the field '{self.name}' is too long", field=self.name)
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise invalid(f"the field '{self.name}' is not UTF-8 text", field=self.name) from None


@dataclass(kw_only=True)
class _State:
    """Filled by the parser's callbacks: the parts that have begun, and where each one's header and data stand."""

    events: deque[tuple[str, bytes]] = field(default_factory=deque)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    header_name: bytes = b""
    header_value: bytes = b""
    header_bytes: int = 0
    num_parts: int = 0


async def parts(request: Request) -> AsyncIterator[Part]:
    """The parts of a form, in order. Raises `ServiceError` for what is not a form."""
    content_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if content_type != b"multipart/form-data" or not boundary:
        raise invalid("send this as multipart/form-data", field="content-type")
    state = _State()
    parser = MultipartParser(boundary, _callbacks(state))
    stream = request.stream()
    ended = False

    async def event() -> tuple[str, bytes] | None:
        nonlocal ended
        while not state.events:
            if ended:
                return None
            chunk = await anext(stream, b"")
            try:
                if chunk:
                    parser.write(chunk)
                else:
                    ended = True
                    parser.finalize()
            except MultipartParseError as error:
                raise invalid(f"the form is broken: {error}") from None
        return state.events.popleft()

    async def data() -> AsyncIterator[bytes]:
        while (next_event := await event()) is not None:
            kind, value = next_event
            if kind == "end":
                return
            yield value
        raise invalid("the form ends in the middle of a part")

    while (next_event := await event()) is not None:
        kind, value = next_event
        if kind != "begin":
            continue
        name, filename = _names(value)
        yield Part(name=name, filename=filename, data=data())


def _names(disposition: bytes) -> tuple[str, str | None]:
    kind, options = parse_options_header(disposition)
    if kind != b"form-data" or b"name" not in options:
        raise invalid("a part of the form has no name")
    filename = options.get(b"filename")
    return (
        options[b"name"].decode("utf-8", "replace"),
        filename.decode("utf-8", "replace") if filename is not None else None,
    )


def _callbacks(state: _State) -> MultipartCallbacks:
    def begin() -> None:
        state.headers.clear()
        state.header_bytes = 0
        state.num_parts += 1
        if state.num_parts > _MAX_PARTS:
            raise invalid(f"the form has more than {_MAX_PARTS} parts")

    def header_name(data: bytes, start: int, end: int) -> None:
        state.header_name += data[start:end]
        count(end - start)

    def header_value(data: bytes, start: int, end: int) -> None:
        state.header_value += data[start:end]
        count(end - start)

    def count(num_bytes: int) -> None:
        state.header_bytes += num_bytes
        if state.header_bytes > _MAX_HEADER_BYTES:
            raise invalid("the headers of a part are too long")

    def header_end() -> None:
        state.headers[state.header_name.lower()] = state.header_value
        state.header_name = state.header_value = b""

    def headers_finished() -> None:
        state.events.append(("begin", state.headers.get(b"content-disposition", b"")))

    def part_data(data: bytes, start: int, end: int) -> None:
        state.events.append(("data", data[start:end]))

    def part_end() -> None:
        state.events.append(("end", b""))

    return {
        "on_part_begin": begin,
        "on_header_field": header_name,
        "on_header_value": header_value,
        "on_header_end": header_end,
        "on_headers_finished": headers_finished,
        "on_part_data": part_data,
        "on_part_end": part_end,
    }
