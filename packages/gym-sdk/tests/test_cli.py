"""Guards the root of the `gym` command: what failures look like, what exit codes say, and that nothing heavy loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_sdk.cli import Command, _root, console
from gym_sdk.errors import DataError, RunFailed, Where

GYM = [sys.executable, "-c", "from gym_sdk.cli import main; main()"]


def gym(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GYM, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


Register = Callable[[Callable[..., object]], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Put a function behind `gym try`."""

    def put(function: Callable[..., object]) -> None:
        module = types.ModuleType("a_package_with_commands")
        module.target = function  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        commands = {"try": Command("Try something", f"{module.__name__}:target")}
        monkeypatch.setattr(_root, "find_commands", lambda: {"gym-sdk": commands})

    return put


def test_help_lists_each_command_with_its_summary() -> None:
    result = gym("--help")
    assert result.returncode == 0
    assert "usage: gym COMMAND" in result.stdout
    assert "  explain  " in result.stdout.replace("explain     ", "explain  ")
    assert "Say what a field of run.yaml means" in result.stdout
    assert result.stderr == ""
    assert gym().stdout == gym("-h").stdout == gym("help").stdout == result.stdout


def test_version_names_the_packages() -> None:
    assert gym("--version").stdout.splitlines()[0].startswith("gym-sdk ")


def test_help_of_a_command_is_reached_both_ways() -> None:
    assert gym("help", "explain").stdout == gym("explain", "--help").stdout
    assert "default" in gym("explain", "--help").stdout


MISTAKES = [
    (("explan",), "error: there is no command explan\nhint: did you mean gym explain?\n"),
    (("qqq",), "error: there is no command qqq\nhint: `gym --help` lists the commands\n"),
    (
        ("--frob",),
        "error: unknown option --frob\nhint: usage: gym COMMAND [ARGUMENTS]; `gym --help` lists the commands\n",
    ),
    (("explain", "--jsn"), "error: Unknown option: --jsn. Did you mean --json?\nhint: gym explain --help\n"),
    (("spec", "show"), 'error: Command "show" parameter PATH requires an argument\nhint: gym spec show --help\n'),
    (
        ("spec", "shw"),
        'error: Unknown command "shw". Did you mean "show"? Available commands: validate, show\n'
        "hint: gym spec --help\n",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_a_mistake_on_the_command_line_is_exit_2_with_the_nearest_name(arguments: list[str], expected: str) -> None:
    result = gym(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_a_command_of_a_package_that_is_not_there_gives_the_install_hint(
    register: Register, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(lambda: None)
    monkeypatch.setattr(_root, "_is_installed", lambda package: False)
    assert _root.run(["train", "run.yaml"]) == 2
    assert capsys.readouterr().err == (
        'error: gym train comes with gym-trainer, which is not installed\nhint: pip install "gym-trainer[torch]"\n'
    )
    assert _root.run(["data", "inspect"]) == 2
    assert capsys.readouterr().err.endswith('hint: pip install "gym-data"\n')


def test_a_command_that_needs_an_extra_gives_the_install_hint(
    register: Register, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(lambda: None)

    def no_torch(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(_root.importlib, "import_module", no_torch)
    assert _root.run(["try"]) == 2
    assert capsys.readouterr().err == (
        'error: gym try needs torch, which is not installed\nhint: pip install "a-package-with-commands[torch]"\n'
    )


def test_a_mistake_in_the_input_is_exit_2(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise DataError("not JSON", where=Where(file="rows.jsonl", line=3), hint="fix it")

    register(fail)
    assert _root.run(["try"]) == 2
    assert capsys.readouterr() == ("", "error: rows.jsonl:3: not JSON\nhint: fix it\n")


def test_a_failure_of_ours_is_exit_1(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RunFailed("the loss is not a number")

    register(fail)
    assert _root.run(["try"]) == 1
    assert capsys.readouterr().err == "error: the loss is not a number\n"


def test_an_unexpected_failure_is_a_line_and_a_log(
    register: Register, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str) -> None:
        raise KeyError("who\nknows")

    register(fail)
    monkeypatch.setenv("GYM_CACHE_DIR", str(tmp_path))
    assert _root.run(["try", "secret-key"]) == 1
    (log,) = (tmp_path / "crashes").iterdir()
    assert capsys.readouterr().err == (
        f"error: something broke inside gym: KeyError: 'who\\nknows'\nthe full traceback is in {log}\n"
        "hint: `gym doctor --report` prints what a bug report needs; GYM_TRACEBACK=1 shows the traceback here\n"
    )
    content = log.read_text()
    assert "raise KeyError" in content
    assert content.startswith("gym try\n")
    assert "secret-key" not in content.splitlines()[0]

    monkeypatch.setenv("GYM_TRACEBACK", "1")
    assert _root.run(["try", "x"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_what_a_command_returns_is_the_exit_code(register: Register) -> None:
    for returned, code in ((None, 0), (0, 0), (3, 3), (True, 0), ("text", 0)):
        register(lambda returned=returned: returned)
        assert _root.run(["try"]) == code


def test_ctrl_c_is_130(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    register(interrupt)
    assert _root.run(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_reader_that_has_gone_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([*GYM, "schema"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (141, b"")


def test_a_broken_package_of_someone_else_does_not_break_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Point:
        def __init__(self, name: str, commands: object) -> None:
            self.name, self.commands = name, commands

        def load(self) -> object:
            if isinstance(self.commands, Exception):
                raise self.commands
            return self.commands

    points = [Point("other", ImportError("no such module")), Point("gym-sdk", {"x": Command("Do x", "m:f")})]
    monkeypatch.setattr(_root.importlib.metadata, "entry_points", lambda group: points)
    assert _root.run(["--help"]) == 0
    captured = capsys.readouterr()
    assert "  x  Do x" in captured.out
    assert captured.err == "warning: the commands of other cannot be loaded: no such module\n"


def test_no_colour_codes_reach_a_pipe() -> None:
    for arguments in (("explain", "--help"), ("explain", "train"), ("nope",)):
        result = gym(*arguments, FORCE_COLOR="")
        assert "\x1b" not in result.stdout + result.stderr


def test_plain_progress_is_a_line_every_few_seconds() -> None:
    now, lines = [0.0], []
    progress = console.PlainProgress(1000, "rows", "read", clock=lambda: now[0], write=lines.append)
    for done in range(100, 1001, 100):
        now[0] += 2
        progress.update(done)
    progress.finish()
    assert lines == [
        "read: 0/1,000 rows",
        "read: 300/1,000 rows, 14 s left",
        "read: 600/1,000 rows, 8 s left",
        "read: 900/1,000 rows, 2 s left",
        "read: 1,000/1,000 rows, took 20 s",
    ]


def test_a_terminal_gets_a_bar_with_the_amount(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    with console.progress(None, "bytes", "download") as progress:
        progress.update(1e6, 4e6)
        progress.advance(2e6)
    assert "download" in (shown := capsys.readouterr().err)
    assert "3.0/4.0 MB" in shown


@pytest.mark.parametrize(
    ("done", "total", "unit", "expected"),
    [
        (3, 10, "steps", "3/10 steps"),
        (12, None, "rows", "12 rows"),
        (1.25e9, 4e9, "bytes", "1.2/4.0 GB"),
        (89_100_000, None, "bytes", "89.1 MB"),
        (12, 900, "bytes", "12/900 bytes"),
        (0, None, "bytes", "0 bytes"),
    ],
)
def test_amounts_are_readable(done: float, total: float | None, unit: str, expected: str) -> None:
    assert console.format_amount(done, total, unit) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (12_000, "3 h 20 min")]
)
def test_durations_are_readable(seconds: float, expected: str) -> None:
    assert console.format_duration(seconds) == expected


def test_validate_says_it_to_scripts(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {source: Q/q}\ndata: {train: [{source: x}]}\nseed: -1\n")
    bad = gym("spec", "validate", str(path), "--json")
    assert bad.returncode == 2
    assert json.loads(bad.stdout) == {
        "valid": False,
        "problems": [
            {
                "message": "must be a whole number of at least 0 and below 4294967296; got -1",
                "file": str(path),
                "line": 3,
                "path": "seed",
                "hint": None,
            }
        ],
    }
    good = gym("spec", "validate", str(path), "seed=1", "--json")
    assert good.returncode == 0
    assert json.loads(good.stdout)["valid"] is True
    shown = gym("spec", "show", str(path), "seed=5")
    assert "seed: 5\n" in shown.stdout
