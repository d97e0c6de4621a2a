"""Guards against tracebacks and silent changes: random bytes and cut files in readers, random chats in masks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_families import FAMILIES, record_of

from gym_data import ChatRenderer, read_records
from gym_data.rendering.batch import BatchEncoder, Chat
from gym_sdk.errors import DataError, GymError
from gym_sdk.spec.data import DataSource

SUFFIXES = [".jsonl", ".json", ".csv", ".tsv", ".txt", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ROWS = [
    {"messages": [{"role": "user", "content": "é 日本"}, {"role": "assistant", "content": "007"}]},
    {"messages": [{"role": "user", "content": "b\nc"}, {"role": "assistant", "content": "d"}]},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def _arrow(kind: str) -> bytes:
    table = pyarrow.Table.from_pylist([{"prompt": f"é {i}", "completion": f"b{i}"} for i in range(3)])
    out = pyarrow.BufferOutputStream()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, out)
    else:
        new = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with new(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue().to_pybytes()


FILES = {
    ".jsonl": LINES,
    ".json": json.dumps(ROWS).encode(),
    ".csv": b'prompt,completion\n"a, b","c\nd"\ne,f\n',
    ".tsv": b"prompt\tcompletion\na, b\tc\ne\tf\n",
    ".txt": "é 日本\n".encode(),
    ".jsonl.gz": gzip.compress(LINES),
    ".jsonl.zst": zstandard.compress(LINES),
    ".parquet": _arrow("parquet"),
    ".arrow": _arrow("arrow"),
    ".stream.arrow": _arrow("stream"),
}
ENDLESS = (".csv", ".tsv", ".txt")
"""Files whose last value cannot be told from one that was cut."""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_random_bytes_are_rows_or_an_error_with_a_place(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"

    pieces = [b"{", b"[", b'{"messages": []}', b'{"text": 1}', b"\x00", b"a,a\n1,2"]

    @QUICK
    @given(st.binary(max_size=60) | st.sampled_from(pieces))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            list(read_records(DataSource(source=str(path))))
        except DataError as error:
            places.append(str(error))

    places: list[str] = []
    check()
    assert all(str(path) in place for place in places)


@pytest.mark.parametrize("suffix", FILES)
def test_a_cut_file_gives_its_whole_rows_or_an_error_and_never_a_changed_value(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(FILES[suffix])
    whole = [(record.prompt, record.candidates) for record in read_records(DataSource(source=str(path)))]
    for cut in range(0, len(FILES[suffix]), 1 + len(FILES[suffix]) // 400):
        path.write_bytes(FILES[suffix][:cut])
        try:
            found = [(record.prompt, record.candidates) for record in read_records(DataSource(source=str(path)))]
        except GymError:
            continue
        if suffix not in ENDLESS:
            assert found == whole[: len(found)]


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_with_a_changed_byte_is_rows_or_an_error_with_its_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"

    @QUICK
    @given(st.integers(0, len(FILES[suffix]) - 1), st.integers(1, 255))
    def check(place: int, change: int) -> None:
        data = bytearray(FILES[suffix])
        data[place] ^= change
        path.write_bytes(data)
        try:
            list(read_records(DataSource(source=str(path))))
        except DataError as error:
            places.append(str(error))

    places: list[str] = []
    check()
    assert all(str(path) in place for place in places)


# fmt: off
PIECES = [
    "a", " ", "\n", "is", "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<tool_response>", "[INST]",
    "</s>", "<｜User｜>", "<end_of_turn>", "<|end|>", "<|eot_id|>", "日", "é", "\u200d", "{{", "%}", "'", '"', "\\",
]
# fmt: on
TEXT = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT | st.none()},
    optional={"reasoning_content": TEXT},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_chats_are_masked_alike_by_both_ways_or_refused(family: str) -> None:
    renderer = ChatRenderer(FAMILIES[family].tokenizer())
    batch = BatchEncoder(renderer)
    control = {renderer.tokenizer.id_of(token) for token in renderer.control_tokens}

    @QUICK
    @given(st.lists(TURN, min_size=1, max_size=5))
    def check(messages: list[dict[str, Any]]) -> None:
        record = record_of({"messages": messages})
        try:
            one = renderer.encode_training(record)
        except DataError:
            return
        for _ in range(2):
            (other,) = batch.encode([Chat(record, "all")])
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.loss_mask, other.loss_mask)
        # Text of other roles never becomes a control token: replacing it changes no control token's number.
        plain = [{**m, "content": "a"} if m["role"] != "assistant" and m["content"] else m for m in messages]
        try:
            reference = renderer.encode_training(record_of({"messages": plain}))
        except DataError:
            return
        count = [sum(id_ in control for id_ in encoded.ids.tolist()) for encoded in (one, reference)]
        assert count[0] <= count[1] or family in ("qwen3", "glm4moe")  # these look for tool results in user texts

    check()
