"""Any dataset in, exactly masked tokens out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_data._prepare import Prepared, prepare
    from gym_data.encoding.tokenizer import Tokenizer
    from gym_data.record import Candidate, Message, Part, Record, Source, ToolCall
    from gym_data.rendering.renderer import ChatRenderer, Encoded
    from gym_data.report import DataReport
    from gym_data.sources.records import read_records
    from gym_data.store.read import Document, TokenStore
    from gym_data.streaming.stream import RowStream, Streamed, open_stream

_HOMES = {
    "Candidate": "record",
    "ChatRenderer": "rendering.renderer",
    "DataReport": "report",
    "Document": "store.read",
    "Encoded": "rendering.renderer",
    "Message": "record",
    "Part": "record",
    "Prepared": "_prepare",
    "Record": "record",
    "RowStream": "streaming.stream",
    "Source": "record",
    "Streamed": "streaming.stream",
    "TokenStore": "store.read",
    "Tokenizer": "encoding.tokenizer",
    "ToolCall": "record",
    "open_stream": "streaming.stream",
    "prepare": "_prepare",
    "read_records": "sources.records",
}

__all__ = [
    "Candidate",
    "ChatRenderer",
    "DataReport",
    "Document",
    "Encoded",
    "Message",
    "Part",
    "Prepared",
    "Record",
    "RowStream",
    "Source",
    "Streamed",
    "TokenStore",
    "Tokenizer",
    "ToolCall",
    "open_stream",
    "prepare",
    "read_records",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
