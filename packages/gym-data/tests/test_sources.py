"""Guards where rows come from: spreadsheets as people save them, saved data sets, URLs, `dataset_info.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_data import Record, prepare, read_records
from gym_data.sources.inputs import Position, open_input
from gym_sdk.cli._root import run as gym
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec


def pairs(source: DataSource) -> list[tuple[str, str]]:
    return [(record.prompt[-1].text, record.messages[-1].text) for record in read_records(source)]


SHEET = [("Größe?", 'klein, "fein"'), ("wo; wann", "zwei\nZeilen"), ("00501", "1,10")]


def sheet(delimiter: str, line_end: str = "\r\n") -> str:
    quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row] for row in SHEET]
    return line_end.join([f"prompt{delimiter}completion", *(delimiter.join(row) for row in quoted), ""])


@pytest.mark.parametrize(
    ("name", "data", "encoding"),
    [
        ("plain.csv", sheet(",").encode(), "utf-8"),
        ("excel-utf8.csv", sheet(",").encode("utf-8-sig"), "utf-8"),
        ("german.csv", sheet(";").encode("cp1252"), "cp1252"),
        ("latin.csv", sheet(";").encode("latin-1"), "latin-1"),
        ("named.csv", ("sep=;\r\n" + sheet(";")).encode("utf-8-sig"), "utf-8"),
        ("unicode.csv", sheet("\t").encode("utf-16"), "utf-8"),
        ("tabs.tsv", sheet("\t").encode(), "utf-8"),
        ("unix.csv.gz", __import__("gzip").compress(sheet(";", "\n").encode()), "utf-8"),
    ],
)
def test_a_table_as_a_spreadsheet_saves_it(tmp_path: Path, name: str, data: bytes, encoding: str) -> None:
    (tmp_path / name).write_bytes(data)
    found = list(read_records(DataSource(source=str(tmp_path / name), encoding=encoding)))
    assert [(record.prompt[0].text, record.messages[-1].text) for record in found] == SHEET
    first = 3 if name == "named.csv" else 2
    assert [record.source.row for record in found if record.source] == [first, first + 1, first + 3]


def test_a_table_that_is_not_utf8_says_which_byte_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_bytes(sheet(";").encode("cp1252"))
    with pytest.raises(DataError) as caught:
        list(read_records(DataSource(source=str(path))))
    assert f"{path}:2:4: not UTF-8 text: byte 0xf6" in str(caught.value)
    assert "encoding: cp1252" in str(caught.value)
    with pytest.raises(DataError, match="unknown encoding 'cp12522'"):
        list(read_records(DataSource(source=str(path), encoding="cp12522")))
    text = tmp_path / "old.txt"
    text.write_bytes("Die Größe".encode("cp1252"))
    with pytest.raises(DataError, match=r"old.txt:1:7: not UTF-8 text: byte 0xf6"):
        list(read_records(DataSource(source=str(text))))
    (record,) = read_records(DataSource(source=str(text), encoding="cp1252"))
    assert record.messages[0].text == "Die Größe"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("row", "key"),
    [
        ('{"prompt": "a", "completion": "b", "prompt": "c"}', "prompt"),
        (r'{"prompt":"\u0022:","completion":"b","completion":"b"}', "completion"),
        ('{"messages":[{"role":"user","role":"user","content":"a"},{"role":"assistant","content":"b"}]}', "role"),
        ('{"prompt":"a","prompt":"b","id":123456789012345678901}', "prompt"),
    ],
)
def test_a_key_that_stands_twice_is_an_error_with_its_place(tmp_path: Path, name: str, row: str, key: str) -> None:
    good = r'{"prompt": "{\"a\":1,\"a\":1}", "completion": "\\"}'
    rows = [good, row]
    (tmp_path / name).write_text("\n".join(rows) if name.endswith("l") else f"[{','.join(rows)}]", encoding="utf-8")
    with pytest.raises(DataError, match=f'the key "{key}" stands twice in one object') as caught:
        list(read_records(DataSource(source=str(tmp_path / name))))
    assert str(caught.value).startswith(f"{tmp_path / name}:{2 if name.endswith('l') else 1}: ")


def test_a_new_user_goes_from_a_spreadsheet_to_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.csv"
    path.write_bytes("Frage;Antwort\r\nGröße?;klein\r\n".encode("cp1252"))
    assert gym(["data", "inspect", str(path)]) == 2
    assert "encoding: cp1252" in capsys.readouterr().err
    assert gym(["data", "inspect", str(path), "--encoding", "cp1252"]) == 2
    assert "its columns are 'Frage', 'Antwort'" in capsys.readouterr().err
    reading = ["--encoding", "cp1252", "--column", "prompt=Frage", "--column", "completion=Antwort"]
    assert gym(["data", "convert", str(path), *reading, "--to", "openai", "-o", str(tmp_path / "o.jsonl")]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert row["messages"] == [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "klein"}]


def test_a_sharegpt_dump_and_a_folder_of_text_files(
    smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    dump = [
        {"id": f"x_{i}", "conversations": [{"from": who, "value": text} for who, text in turns], "lang": "en"}
        for i in range(3)
    ]
    (tmp_path / "dump.json").write_text(json.dumps(dump, indent=1))
    assert gym(["data", "inspect", str(tmp_path / "dump.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["formats"]) == (3, {"sharegpt": 3})
    assert found["first_row"] == dump[0]
    made = prepare(
        DataSpec(train=[DataSource(source=str(tmp_path / "dump.json"))]), smollm2_folder, cache_dir=tmp_path, seed=0
    )
    assert made.report.rows_train == 3
    assert [t.text for t in made.report.samples[0].tokens if t.trained] == ["b<|im_end|>", "d<|im_end|>"]

    notes = tmp_path / "notes" / "deep"
    notes.mkdir(parents=True)
    (tmp_path / "notes" / "b.md").write_text("# Kea\n\nA parrot.")
    (notes / "a.txt").write_text("Weka")
    (notes / "empty.txt").write_text("")
    data = DataSpec(train=[DataSource(source=str(tmp_path / "notes"))])
    made = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert (made.report.rows_in, made.report.rows_train) == (2, 2)
    assert "# Data card" in (made.folder / "card.md").read_text()
    assert made.report.fingerprint in (made.folder / "card.md").read_text()


ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(5)]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".parquet", ".arrow"])
@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_urls_are_read_through_fsspec_as_files_are(tmp_path: Path, protocol: str, suffix: str) -> None:
    import fsspec

    local = tmp_path / f"rows{suffix}"
    write_rows(local)
    url = f"file://{local}"
    if protocol == "memory":
        url = f"memory://{tmp_path.name}/rows{suffix}"
        with fsspec.open(url, "wb") as file:
            file.write(local.read_bytes())  # type: ignore[attr-defined]
    source = DataSource(source=url)
    assert pairs(source) == pairs(DataSource(source=str(local))) == [(f"q{i}", f"a{i}") for i in range(5)]
    opened = open_input(source)
    assert len({opened.digest(), open_input(DataSource(source=str(local))).digest()}) == 1
    assert opened.quick_digest() == open_input(DataSource(source=str(local))).quick_digest()
    assert [position for position, _ in opened.chunks_from(Position())] == [Position()]


def test_a_url_that_is_not_there_or_not_known_is_an_error_with_its_address(tmp_path: Path) -> None:
    for url in ("memory://nowhere/rows.jsonl", f"file://{tmp_path}/none.jsonl", "memory://nowhere/rows.parquet"):
        with pytest.raises(DataError, match=r"does not exist|cannot be read"):
            list(read_records(DataSource(source=url)))
    with pytest.raises(DataError, match=r"gopher://x/rows.jsonl: .*[Pp]rotocol"):
        list(read_records(DataSource(source="gopher://x/rows.jsonl")))


def write_rows(path: Path) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(ROWS)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    match path.name.removeprefix("rows"):
        case ".jsonl":
            path.write_bytes(lines)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case ".csv":
            path.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in ROWS))
        case ".parquet":
            pyarrow.parquet.write_table(table, path)
        case _:
            with pyarrow.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)


TOOLED = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "note": None},
    {"messages": [{"role": "user", "content": "c", "name": "n"}, {"role": "assistant", "content": "d"}], "note": "x"},
]


def test_a_data_set_saved_to_disk_is_read_by_split_and_without_invented_nulls(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(TOOLED)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "many")
    for source, count in (
        (DataSource(source=str(tmp_path / "one")), 2),
        (DataSource(source=str(tmp_path / "many")), 2),
        (DataSource(source=str(tmp_path / "many"), split="test"), 1),
    ):
        assert len(pairs(source)) == count
    records = list(read_records(DataSource(source=str(tmp_path / "one"))))
    assert [message.name for record in records for message in record.messages] == [None, None, "n", None]
    with pytest.raises(DataError, match="no split 'dev'"):
        list(read_records(DataSource(source=str(tmp_path / "many"), split="dev")))


def test_a_hub_data_set_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(TOOLED).save_to_disk(tmp_path / "one")
    asked: list[Any] = []

    def load_dataset(*names: str, **options: Any) -> Any:
        asked.append((names, options))
        if names[0] == "kea/none":
            raise FileNotFoundError("no such data set")
        return datasets.load_from_disk(tmp_path / "one")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = DataSource(source="hub:kea/notes/small", split="test", revision="v1", limit=1)
    records = list(read_records(source))
    assert asked == [(("kea/notes", "small"), {"split": "test", "revision": "v1"})]
    assert [record.messages[0].name for record in records] == [None]
    first, second = (open_input(DataSource(source=f"hub:kea/{name}")) for name in ("notes", "more"))
    assert first.digest() == open_input(DataSource(source="hub:kea/notes")).digest() != second.digest()
    with pytest.raises(DataError, match="hub:kea/none: cannot be read: no such data set"):
        list(read_records(DataSource(source="hub:kea/none")))


# LLaMA-Factory's dataset_info.json


def described(tmp_path: Path, entry: dict[str, Any], rows: list[dict[str, Any]]) -> list[Record]:
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json", **entry}}))
    return list(read_records(DataSource(source=f"{tmp_path}/dataset_info.json#mine")))


def test_an_alpaca_entry_with_its_own_columns(tmp_path: Path) -> None:
    entry = {"columns": {"prompt": "ask", "query": "with", "response": "say", "history": "before", "system": "sys"}}
    row = {"ask": "Add.", "with": "1 2", "say": "3", "before": [["Hi", "Hello"]], "sys": "s"}
    (record,) = described(tmp_path, entry, [row])
    assert [(m.role, m.text) for m in record.messages] == [
        ("system", "s"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]
    (record,) = described(tmp_path, {}, [{"instruction": "Add.", "input": "", "output": "3"}])
    assert [m.text for m in record.messages] == ["Add.", "3"]


def test_ranking_kto_tag_and_images_are_read(tmp_path: Path) -> None:
    entry = {"ranking": True, "columns": {"prompt": "instruction", "chosen": "good", "rejected": "bad"}}
    (pair,) = described(tmp_path, entry, [{"instruction": "q", "good": "a", "bad": "b"}])
    assert (pair.kind, [c.messages[0].text for c in pair.candidates]) == ("preference", ["a", "b"])
    entry = {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "label"}}
    (labelled,) = described(tmp_path, entry, [{"instruction": "q", "output": "a", "label": False}])
    assert (labelled.kind, labelled.candidates[0].label) == ("unpaired", False)
    entry = {
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "pictures"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "it"},
    }
    turns = [{"who": "me", "what": "<image>Which bird?"}, {"who": "it", "what": "A kea."}]
    (seen,) = described(tmp_path, entry, [{"messages": turns, "pictures": ["kea.png"]}])
    assert [part.type for part in seen.prompt[0].parts] == ["image", "text"]
    assert seen.messages[-1].text == "A kea."
    entry |= {"ranking": True, "columns": {"messages": "messages", "chosen": "good", "rejected": "bad"}}
    answers = {"good": {"who": "it", "what": "a"}, "bad": {"who": "it", "what": "b"}}
    (pair,) = described(tmp_path, entry, [{"messages": [{"who": "me", "what": "q"}], **answers}])
    assert [c.messages[0].text for c in pair.candidates] == ["a", "b"]


def test_openai_messages_and_plain_text_entries(tmp_path: Path) -> None:
    entry = {
        "formatting": "sharegpt",
        "columns": {"messages": "chat"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (record,) = described(tmp_path, entry, [{"chat": turns}])
    assert (record.source and record.source.format, record.messages[-1].text) == ("openai", "a")
    (text,) = described(tmp_path, {"columns": {"prompt": "body"}, "num_samples": 1}, [{"body": "x"}, {"body": "y"}])
    assert (text.kind, text.messages[0].text) == ("text", "x")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"formatting": "odd"}, "unknown formatting 'odd'"),
        ({"ranking": True}, "ranking needs the columns chosen and rejected"),
        ({"file_name": None}, "the entry names no file_name"),
        ({"script_url": "x.py"}, "settings that Gym does not know: script_url"),
        ({"columns": {"response": "answer"}}, "there is no column 'answer'"),
    ],
)
def test_an_entry_that_cannot_be_used_says_why(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        described(tmp_path, entry, [{"instruction": "q", "output": "a"}])


def test_a_name_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"alpaca_demo": {"file_name": "a.json"}}')
    with pytest.raises(DataError, match=r"no data set 'alpaca_dmo'\nhint: Did you mean 'alpaca_demo'"):
        list(read_records(DataSource(source=f"{tmp_path}/dataset_info.json#alpaca_dmo")))
    with pytest.raises(DataError, match=r"none/dataset_info.json: cannot be read"):
        list(read_records(DataSource(source=f"{tmp_path}/none/dataset_info.json#x")))


def test_a_changed_entry_is_another_preparation(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [{"instruction": "q", "output": "a", "other": "b"}]
    made = []
    for column in ("output", "other"):
        described(tmp_path, {"columns": {"prompt": "instruction", "response": column}}, rows)
        data = DataSpec(train=[DataSource(source=f"{tmp_path}/dataset_info.json#mine")])
        made.append(prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0))
    assert made[0].report.fingerprint != made[1].report.fingerprint
    assert [t.text for t in made[1].report.samples[0].tokens if t.trained] == ["b<|im_end|>"]
