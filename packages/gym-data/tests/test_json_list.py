"""Guards JSON lists that are read element by element: the rows, the faults and their places are those of the whole."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_data._json import RepeatedKey, loads
from gym_data.sources import json_list
from gym_data.sources.chunk import json_error
from gym_data.sources.json_list import list_rows
from gym_sdk.errors import DataError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(max_size=6)
    | st.sampled_from(["é\n", '"\\', "]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
# No numbers of 19 digits: the standard library reads texts with them, and counts the columns of faults in its own way.
EDITS = ["", "]", ",", "{", "1", '"', "\n", "NaN", "\x00", "\\"]
ROWS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=4)


def read(data: bytes, block_bytes: int, patch: pytest.MonkeyPatch) -> list[Any]:
    patch.setattr(json_list, "BLOCK_BYTES", block_bytes)
    return [row for _, row in list_rows(io.BytesIO(data), "a.json")]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
    edit=st.none()
    | st.tuples(st.integers(1, 200), st.sampled_from(["", "]", ",", "{", "1", '"', "\n", "NaN", "\x00", "\\"])),
    block_bytes=st.sampled_from([1, 2, 7, 64, 1 << 20]),
)
def test_rows_and_faults_are_those_of_the_whole_text(
    monkeypatch: pytest.MonkeyPatch, rows: list[Any], indent: int | None, is_ascii: bool, edit: Any, block_bytes: int
) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=is_ascii)
    if edit is not None:
        place, new = edit
        place = min(place, len(text))
        text = text[:place] + new + text[place + (not new) :]
    data = text.encode()
    try:
        expected = loads(data)
    except RepeatedKey as error:
        with pytest.raises(DataError, match=str(error)):
            read(data, block_bytes, monkeypatch)
        return
    except ValueError as error:
        wanted = json_error(error, data, "a.json", 1)
        with pytest.raises(DataError) as caught:
            read(data, block_bytes, monkeypatch)
        # A row before the fault may be wrong too, and orjson has several places for an end that comes too early.
        if "must be a JSON object" in caught.value.message:
            return
        if "end of data" not in wanted.message:
            assert (caught.value.where.line, caught.value.where.column) == (wanted.where.line, wanted.where.column)
        assert caught.value.message.startswith("not valid JSON") or "\0" in text[:4]
        return
    if all(isinstance(row, dict) for row in expected):
        assert read(data, block_bytes, monkeypatch) == expected
    else:
        with pytest.raises(DataError, match="a row must be a JSON object"):
            read(data, block_bytes, monkeypatch)


@pytest.mark.parametrize("block_bytes", [1, 5, 1 << 20])
def test_a_byte_that_is_not_utf8_has_its_place(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    with pytest.raises(DataError, match=r"a.json:2:8: not UTF-8 text: byte 0xe9"):
        read('[{"ü": 1},\n{"a": "'.encode() + b'\xe9"}]', block_bytes, monkeypatch)


def test_deep_nesting_is_an_error_with_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"a.json:1:\d+: not valid JSON"):
        read(b'[{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", 1 << 10, monkeypatch)


def test_a_long_list_is_never_whole_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        """A list of 8 MB whose end is missing."""

        left = 8000

        def read(self, size: int) -> bytes:
            count = min(self.left, size // 1000)
            start = b"[" if self.left == 8000 else b""
            self.left -= count
            return start + (b'{"text": "' + b"a" * 986 + b'"},\n') * count

    monkeypatch.setattr(json_list, "BLOCK_BYTES", 1 << 16)
    tracemalloc.start()
    count = 0
    rows = list_rows(Endless(), "a.json")  # type: ignore[arg-type]
    for _ in range(8000):
        count += len(next(rows)[1]["text"]) == 986
    with pytest.raises(DataError, match="not valid JSON"):
        next(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000
    assert peak < 1 << 20
