"""Guards the rows that people have: odd shapes, broken lines, and values that must not change."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gym_data import Record, read_records
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource


def records(path: Path, rows: list[Any] | str, **fields: Any) -> list[Record]:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return list(read_records(DataSource(source=str(path), **fields)))


def chat(answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}


def test_strings_stay_strings(tmp_path: Path) -> None:
    answers = ["007", "true", "null", "1e5", "2024-01-01", " 1.10 "]
    found = records(tmp_path / "a.jsonl", [*map(chat, answers), chat([{"type": "text", "text": "1_000"}])])
    assert [record.messages[-1].text for record in found] == [*answers, "1_000"]


def test_values_of_a_table_are_the_text_that_stands_in_it(tmp_path: Path) -> None:
    path = tmp_path / "codes.csv"
    columns = {"prompt": "code", "completion": "label"}
    found = records(path, "code,label\n00501,null\n1.10,NA\n", columns=columns)
    assert [(r.prompt[0].text, r.messages[-1].text) for r in found] == [("00501", "null"), ("1.10", "NA")]
    assert [r.source.row for r in found if r.source] == [2, 3]


def test_a_spreadsheet_with_quoted_line_breaks_semicolons_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    path.write_bytes('\ufeffprompt,completion\r\n"a, ""b""\nc",d;e\r\n'.encode())
    (record,) = read_records(DataSource(source=str(path)))
    assert (record.prompt[0].text, record.messages[-1].text) == ('a, "b"\nc', "d;e")


def test_tool_schemas_stay_as_they_are(tmp_path: Path) -> None:
    tools = [
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1, "1"]}}}}}],
        [{"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"x": {"y": []}}}}}}],
    ]
    forms: list[Any] = [{"a": "1"}, '{"a": "1"}']
    rows = []
    for schema, arguments in zip(tools, forms, strict=True):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call, {**call, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "assistant", "content": "a"},
        ]
        rows.append({"messages": turns, "tools": schema})
    found = records(tmp_path / "tools.jsonl", rows)
    assert [json.loads(record.tools_json or "") for record in found] == tools
    for record in found:
        assert [json.loads(call.arguments_json) for call in record.messages[1].calls] == [{"a": "1"}] * 2
        assert [(m.tool_call_id, m.text) for m in record.messages[2:4]] == [("c1", "one"), ("c2", "two")]


SHAREGPT_REFUSED = [
    ({"system": "a", "conversations": [{"from": "system", "value": "b"}]}, "both a system key and a system turn"),
    ({"conversations": [{"from": "narrator", "value": "b"}]}, "unknown speaker 'narrator'"),
    ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "a function_call's value must be JSON"),
    ({"conversations": [{"from": "human"}]}, "a turn needs from and value"),
    (
        {"conversations": [{"from": "human", "value": "<image><image>"}], "images": ["a.png"]},
        "2 <image> placeholders for 1 image files",
    ),
]


@pytest.mark.parametrize(("row", "reason"), SHAREGPT_REFUSED, ids=[reason for _, reason in SHAREGPT_REFUSED])
def test_sharegpt_that_cannot_be_represented_is_refused_with_its_row(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    good = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    with pytest.raises(DataError) as caught:
        records(tmp_path / "s.jsonl", [good, row])
    assert reason in str(caught.value)
    assert f"{tmp_path}/s.jsonl:2" in str(caught.value)


def test_odd_sharegpt_is_represented_exactly(tmp_path: Path) -> None:
    call = json.dumps({"name": "f", "arguments": {"a": 1}})
    turns = [
        ("gpt", "Hello!"),
        ("human", "one"),
        ("human", "two"),
        ("function_call", call),
        ("observation", "3"),
        ("gpt", "done"),
    ]
    row = {"system": "s", "conversations": [{"from": who, "value": text} for who, text in turns]}
    (record,) = records(tmp_path / "s.jsonl", [row])
    roles = [message.role for message in record.messages]
    assert roles == ["system", "assistant", "user", "user", "assistant", "tool", "assistant"]
    assert record.messages[4].calls[0].name == "f"
    assert [m.text for m in record.messages] == ["s", "Hello!", "one", "two", "", "3", "done"]


def test_alpaca_without_input_has_no_trailing_line_break_and_history_is_turns(tmp_path: Path) -> None:
    row = {"instruction": "Name a bird.", "input": "", "output": "Kea", "history": [["Hi", "Hello"]]}
    (record,) = records(tmp_path / "a.jsonl", [row])
    assert [(m.role, m.text) for m in record.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Name a bird."),
        ("assistant", "Kea"),
    ]
    (with_input,) = records(tmp_path / "b.jsonl", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    assert with_input.prompt[0].text == "Add.\n1 2"


def test_rows_of_two_formats_are_an_error_that_lists_them(tmp_path: Path) -> None:
    rows = [chat("a"), chat("b"), chat("c"), {"instruction": "i", "output": "o"}]
    with pytest.raises(DataError, match=r"rows of different formats: openai: rows 1, 2, 3; alpaca: row 4"):
        records(tmp_path / "m.jsonl", rows)


def test_a_row_of_no_known_shape_names_its_columns_and_how_to_map_them(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        records(tmp_path / "m.jsonl", [{"headline": "a", "body": "b"}])
    assert "its columns are 'headline', 'body'" in str(caught.value)
    assert "columns: {prompt: question, completion: answer}" in str(caught.value)


def test_an_unknown_role_names_the_row_and_the_known_roles(tmp_path: Path) -> None:
    row = {"messages": [{"role": "moderator", "content": "x"}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(DataError) as caught:
        records(tmp_path / "r.jsonl", [row])
    assert "r.jsonl:1: messages[0].role: unknown role 'moderator'" in str(caught.value)
    assert "system, developer, user, assistant, tool" in str(caught.value)


def test_a_lone_surrogate_is_an_error_and_a_family_emoji_round_trips(tmp_path: Path) -> None:
    family = "👨‍👩‍👧"
    (record,) = records(tmp_path / "e.jsonl", [chat(family)])
    assert record.messages[-1].text == family
    line = json.dumps(chat("ok")) + "\n" + '{"messages":[{"role":"assistant","content":"\\ud83d"}]}\n'
    with pytest.raises(DataError, match=r"s.jsonl:2:\d+: not valid JSON: .*surrogate"):
        records(tmp_path / "s.jsonl", line)


WHOLE = json.dumps(chat("a")).encode() + b"\n"
BROKEN = WHOLE * 2 + WHOLE[:30] + b"\n" + WHOLE


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("rows.jsonl", BROKEN, r"rows.jsonl:3:\d+: not valid JSON"),
        ("rows.jsonl.gz", gzip.compress(BROKEN), r"rows.jsonl.gz:3:\d+: not valid JSON"),
        ("cut.jsonl.gz", gzip.compress(WHOLE * 99)[:-20], r"cut.jsonl.gz: the file ends in the middle"),
        ("no.jsonl.gz", b"plain text", r"no.jsonl.gz: cannot be read"),
        ("empty.jsonl", b"", r"empty.jsonl:1:1: there are no rows"),
        ("blank.jsonl", b"\n \n", r"blank.jsonl:1:1: there are no rows"),
        ("list.jsonl", b"[1]\n", r"list.jsonl:1:1: a row must be a JSON object"),
        ("latin.jsonl", b'{"text": "caf\xe9"}\n', r"latin.jsonl:1:14: not UTF-8 text: byte 0xe9"),
        ("empty.parquet", b"", r"empty.parquet:1:1: not a valid parquet file"),
        ("empty.arrow", b"", r"empty.arrow:1:1: not a valid arrow file|cannot be read"),
        ("bad.json", b'[{"text": "a"},\n {"text" 1}]', r"bad.json:2:\d+: not valid JSON"),
        ("short.csv", b"prompt,completion\na,b\nc\n", r"short.csv:3: 1 values for 2 columns"),
        ("notes.docx", b"x", r"notes.docx: the suffix .docx is not known"),
    ],
)
def test_broken_files_name_file_line_and_column(tmp_path: Path, name: str, data: bytes, wanted: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=wanted):
        list(read_records(DataSource(source=str(tmp_path / name))))


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"does not exist\nhint: Did you mean .*train.jsonl"):
        list(read_records(DataSource(source=str(tmp_path / "trian.jsonl"))))


def test_folders_globs_and_text_files(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for name in ("b", "a"):
        (tmp_path / "notes" / f"{name}.txt").write_text(f"text {name}")
    (tmp_path / "notes" / ".hidden.txt").write_text("no")
    for source in ("notes", "notes/*.txt"):
        found = list(read_records(DataSource(source=str(tmp_path / source))))
        assert [record.messages[0].text for record in found] == ["text a", "text b"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="the folder has no data files"):
        list(read_records(DataSource(source=str(tmp_path / "none"))))


def test_columns_reach_into_nested_values_and_refuse_to_lose_any(tmp_path: Path) -> None:
    columns = {"instruction": "instruction", "input": "instances[].input", "output": "instances[].output"}
    row = {"id": "x", "instruction": "Do.", "instances": [{"input": "", "output": "Done."}]}
    (record,) = records(tmp_path / "i.jsonl", [row], columns=columns)
    assert [m.text for m in record.messages] == ["Do.", "Done."]
    with pytest.raises(DataError, match=r"i.jsonl:1: .*asks for the only element, but there are 2"):
        records(tmp_path / "i.jsonl", [{**row, "instances": row["instances"] * 2}], columns=columns)


def test_whole_numbers_of_any_size_stay_exact(tmp_path: Path) -> None:
    line = '{"prompt": "a", "completion": "b", "n": 123456789012345678901234567890}\n'
    (record,) = records(tmp_path / "n.jsonl", line)
    assert "123456789012345678901234567890" in (record.meta_json or "")


def test_parquet_keeps_rows_and_adds_no_null_keys_to_nested_values(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "007", "weight": 1}]},
        {"messages": [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "a"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    found = list(read_records(DataSource(source=str(tmp_path / "r.parquet"))))
    assert [record.messages[-1].text for record in found] == ["007", "a"]
    assert [record.meta_json for record in found] == [None, None]


def test_zst_files_are_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "r.jsonl.zst").write_bytes(zstandard.compress(WHOLE * 3))
    assert len(list(read_records(DataSource(source=str(tmp_path / "r.jsonl.zst"))))) == 3
    (tmp_path / "bad.jsonl.zst").write_bytes(zstandard.compress(WHOLE * 3)[:-9] + b"x" * 4)
    with pytest.raises(DataError, match=r"bad.jsonl.zst: "):
        list(read_records(DataSource(source=str(tmp_path / "bad.jsonl.zst"))))


ROW = '{"prompt":"a","completion":"b"}'
TAUGHT = {
    "UTF-16": ("a.jsonl", ROW.encode("utf-16"), ("a.jsonl:1:1: this is UTF-16", "as UTF-8")),
    "UTF-16 without a mark": ("a.jsonl", ROW.encode("utf-16-le"), ("a.jsonl:1:1: this is UTF-16", "as UTF-8")),
    "one list in a .jsonl": ("a.jsonl", f"[{ROW}]".encode(), ("a.jsonl:1:1: a row must be", "are a .json file")),
    "a row over several lines": ("a.jsonl", b'{\n "prompt":"a"}', ("a.jsonl:1:2: not valid", "are a .json file")),
    "a comma after each row": ("a.jsonl", f"{ROW},\n{ROW}".encode(), ("a.jsonl:1:32:", "nothing between the lines")),
    "a row cut short": ("a.jsonl", ROW[:20].encode(), ("a.jsonl:1:", "the file was cut")),
    "Python's quotes": ("a.jsonl", b"{'prompt':'a'}", ("a.jsonl:1:2:", "json.dumps")),
    "None": ("a.jsonl", b'{"prompt":None}', ("a.jsonl:1:11:", "json.dumps")),
    "NaN": ("a.jsonl", b'{"prompt":"a","x":NaN}', ("a.jsonl:1:19:", "no NaN", "null")),
    "an endless number": ("a.jsonl", b'{"prompt":' + b"9" * 5000 + b"}", ("a.jsonl:1:1:", "5000 digits is too long")),
    "no messages": ("a.jsonl", b'{"messages":null}', ("a.jsonl:1: messages: must be a list of messages",)),
    "an empty chat": ("a.jsonl", b'{"messages":[]}', ("a.jsonl:1: messages: has no message",)),
    "a message without a role": (
        "a.jsonl",
        b'{"messages":[{"content":"x"}]}',
        ("a.jsonl:1: messages[0].role:", "user"),
    ),
    "a message that is null": ("a.jsonl", b'{"messages":[null]}', ("a.jsonl:1: messages[0]: a message must be",)),
    "text that is a number": ("a.jsonl", b'{"text":7}', ("a.jsonl:1: text: text must be text, not a number",)),
}


@pytest.mark.parametrize(("name", "content", "told"), TAUGHT.values(), ids=TAUGHT)
def test_a_row_that_cannot_be_read_is_told_with_its_place_and_the_slip_behind_it(
    tmp_path: Path, name: str, content: bytes, told: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_records(DataSource(source=str(tmp_path / name))))
    for part in told:
        assert part in str(caught.value)


def test_formats_that_are_mixed_over_a_folder_are_told_with_their_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":"a"}\n')
    (tmp_path / "b.jsonl").write_text(ROW)
    with pytest.raises(DataError, match=r"text: row a.jsonl:1; prompt_completion: row b.jsonl:1"):
        list(read_records(DataSource(source=str(tmp_path))))


def test_a_source_that_is_no_file_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere.jsonl")
    (tmp_path / "rows.jsonl").write_text(ROW)
    for name, told in (
        ("pipe.jsonl", "is a pipe"),
        ("loop.jsonl", "leads back to itself"),
        ("gone.jsonl", "is a link to nowhere.jsonl"),
        ("rows.jsonl/x", "rows.jsonl is a file, not a folder"),
        ("rows*.json", "Did you mean .*rows.jsonl"),
    ):
        with pytest.raises(DataError, match=told):
            list(read_records(DataSource(source=str(tmp_path / name))))
