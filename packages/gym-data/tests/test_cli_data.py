"""Guards the commands of `gym data` as a user types them: what they write, count and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_sdk.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `gym data ...`."""
    with pytest.raises(SystemExit) as ended:
        main(["data", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_inspect_says_what_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", [chat("q", "a"), chat("q2", "b")])
    code, out, _ = run(capsys, "inspect", file, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["formats"] == {"openai": 2}
    assert data["messages"] == {"user": 2, "assistant": 2}
    assert data["first_row"] == chat("q", "a")


def test_validate_lists_every_problem_and_exits_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad_role = {"messages": [{"role": "moderator", "content": "x"}, {"role": "assistant", "content": "y"}]}
    file = write(tmp_path / "r.jsonl", [chat("q", "a"), '{"messages": [', bad_role, chat("q", "b")])
    code, out, _ = run(capsys, "validate", file)
    assert code == 2
    assert f"{file}:2:" in out
    assert f"{file}:3: messages[0].role: unknown role 'moderator'" in out
    assert "4 rows in, 2 valid, 2 not" in out
    good = write(tmp_path / "g.jsonl", [chat("q", "a")])
    assert run(capsys, "validate", good)[0] == 0


def test_stats_counts_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2_folder: Path) -> None:
    file = write(tmp_path / "r.jsonl", [chat(f"question {i}", "answer " * (i + 1)) for i in range(30)])
    code, out, _ = run(capsys, "stats", file, "--model", smollm2_folder, "--max-length", "256", "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["rows_in"], data["kept"]) == (30, 30)
    assert 0 < data["trained_tokens"] < data["tokens"]
    assert data["pack_fill"] == pytest.approx(data["tokens"] / (data["packs"] * 256), abs=1e-4)
    assert sum(data["lengths_tokens"]["histogram"].values()) == 30


def test_preview_marks_trained_text_in_the_terminal_and_on_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2_folder: Path
) -> None:
    file = write(tmp_path / "r.jsonl", [chat("<b>\x1b[31m", "<script>alert(1)</script>")])
    code, out, _ = run(capsys, "preview", file, "--model", smollm2_folder)
    assert code == 0
    assert "⟦<script>alert(1)</script><|im_end|>⟧" in out
    assert "\x1b" not in out
    page = tmp_path / "page.html"
    assert run(capsys, "preview", file, "--model", smollm2_folder, "--html", page)[0] == 0
    html = page.read_text(encoding="utf-8")
    assert "<mark>&lt;script&gt;alert(1)&lt;/script&gt;&lt;|im_end|&gt;</mark>" in html
    assert "<script" not in html
    assert "http" not in html, "the page needs another file"
    code, _, err = run(capsys, "preview", file, "--model", smollm2_folder, "--html", page)
    assert code == 2
    assert "the output file exists" in err


def test_convert_writes_another_format_and_refuses_to_lose_anything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["a", "b"]]}
    file = write(tmp_path / "a.jsonl", [alpaca])
    out_file = tmp_path / "out.jsonl"
    code, out, _ = run(capsys, "convert", file, "--to", "openai", "-o", out_file)
    assert (code, "1 rows in, 1 kept (1 changed), 0 dropped" in out) == (0, True)
    (row,) = rows_of(out_file)
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "Add.\n1 2"), ("assistant", "3"),
    ]  # fmt: skip
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    }
    lossy = write(tmp_path / "t.jsonl", [chat("q", "a"), tools])
    code, _, err = run(capsys, "convert", lossy, "--to", "prompt_completion", "-o", tmp_path / "n.jsonl")
    assert code == 0 or "cannot be written" in err
    code, _, err = run(capsys, "convert", lossy, "--to", "alpaca", "-o", tmp_path / "m.jsonl")
    assert code == 2
    assert f"{lossy}:2: cannot be written as alpaca" in err
    assert not (tmp_path / "m.jsonl").exists()
    code, out, _ = run(capsys, "convert", lossy, "--to", "alpaca", "-o", tmp_path / "m.jsonl", "--skip")
    assert (code, rows_of(tmp_path / "m.jsonl")) == (0, [{"instruction": "q", "output": "a"}])
    assert "1 dropped: cannot be written as alpaca" in out
    code, _, err = run(capsys, "convert", lossy, "--to", "alpacca", "-o", tmp_path / "z.jsonl")
    assert (code, "Did you mean 'alpaca'?" in err) == (2, True)


def test_split_keeps_equal_rows_on_one_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", [chat(f"q{i % 50}", "a") for i in range(200)])
    arguments = ("split", file, "-o", tmp_path / "t.jsonl", "--held-out", tmp_path / "e.jsonl", "--share", "0.3")
    assert run(capsys, *arguments)[0] == 0
    train, held = (
        {row["messages"][0]["content"] for row in rows_of(tmp_path / name)} for name in ("t.jsonl", "e.jsonl")
    )
    assert held
    assert not train & held
    assert len(train | held) == 50


def test_dedup_drops_equal_and_nearly_equal_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(60))
    rows = [
        chat("q", long),
        {**chat("q", long), "id": 7},
        chat("q", f"{long} more"),
        chat("q", "something else entirely"),
    ]
    file = write(tmp_path / "r.jsonl", rows)
    code, out, _ = run(capsys, "dedup", file, "-o", tmp_path / "d.jsonl", "--json")
    data = json.loads(out)
    assert (code, data["kept"]) == (0, 3)
    assert data["dropped"]["equal to an earlier row"]["lines"] == [f"{file}:2"]
    code, out, _ = run(capsys, "dedup", file, "-o", tmp_path / "n.jsonl", "--near", "0.8", "--json")
    assert json.loads(out)["dropped"]["nearly equal to an earlier row"]["lines"] == [f"{file}:3"]
    assert rows_of(tmp_path / "n.jsonl") == [rows[0], rows[3]]


def test_decontaminate_drops_rows_with_thirteen_words_of_an_evaluation_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    question = "A robe takes two bolts of blue fiber and half that much white fiber how many"
    evaluation = write(tmp_path / "e.jsonl", [chat(question, "3")])
    copied = chat(f"Please: {question.upper()}?", "x")
    close = chat(" ".join(question.split()[:12]), "x")
    file = write(tmp_path / "r.jsonl", [copied, close])
    code, out, _ = run(capsys, "decontaminate", file, "--against", evaluation, "-o", tmp_path / "c.jsonl", "--json")
    assert code == 0
    assert rows_of(tmp_path / "c.jsonl") == [close]
    assert json.loads(out)["dropped"] == {f"holds a piece of {evaluation}": {"count": 1, "lines": [f"{file}:1"]}}


def test_pii_is_counted_and_masked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "Mail jo@park.org or +64 3 123 4567, card 4111 1111 1111 1111, IBAN DE89 3704 0044 0532 0130 00, 10.0.0.1"
    harmless = "In 2024 we saw 12 kea; version 1.2.3, 4111 1111 1111 1112."
    file = write(tmp_path / "r.jsonl", [chat(text, "ok"), chat(harmless, "ok")])
    code, out, _ = run(capsys, "pii", file, "-o", tmp_path / "m.jsonl", "--json")
    data = json.loads(out)
    assert (code, data["changed"], data["kept"]) == (0, 1, 2)
    assert data["found"] == {"email": 1, "phone": 1, "card": 1, "iban": 1, "ip": 1}
    first, second = rows_of(tmp_path / "m.jsonl")
    assert first["messages"][0]["content"] == "Mail [EMAIL] or [PHONE], card [CARD], IBAN [IBAN], [IP]"
    assert second == chat(harmless, "ok")


def test_mistakes_are_one_message_and_exit_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", [chat("q", "a")])
    for arguments in (
        ("inspect", tmp_path / "missing.jsonl"),
        ("inspect",),
        ("inspect", file, "--column", "prompt"),
        ("stats", file, "--model", tmp_path / "no-model"),
        ("split", file, "-o", tmp_path / "a", "--held-out", tmp_path / "b", "--share", "2"),
        ("dedup", file, "-o", file),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2, arguments
        assert "Traceback" not in err
        assert "error" in err
    assert rows_of(file) == [chat("q", "a")]
