"""The quality gates of the repository, each a task of its own.

    uv run tools/check.py                # all of them
    uv run tools/check.py types length   # some of them
    uv run tools/check.py lock --write   # bring requirements.lock up to date

CI and the pre-commit hooks call these same tasks. Exit code 1 when any of them finds something.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# Every public symbol has its type written down here; gym_trainer is strict, but leaves some to inference.
FULLY_TYPED = ("gym_sdk", "gym_data", "gym_serve", "gym_trainer")
GENERATED = "/_proto/"
LOCK = REPOSITORY / "requirements.lock"
MAX_LINES = 600
ADDRESS = re.compile(
    r"https?://[^\s\"']*/(?:simple|packages)/|file:///\S+\.whl|^--(?:index-url|extra-index-url|find-links)\b",
    re.MULTILINE,
)


def succeeds(*command: str) -> bool:
    """Run a command in the repository, its output shown."""
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode == 0


def tracked_files() -> list[str]:
    listing = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    return [name for name in listing.stdout.decode().split("\0") if name and (REPOSITORY / name).is_file()]


def report(problems: list[str]) -> bool:
    for problem in problems:
        print(problem)
    return not problems


def lint() -> bool:
    """ruff: rules and formatting."""
    return all((succeeds("ruff", "check", "."), succeeds("ruff", "format", "--check", ".")))


def types() -> bool:
    """basedpyright: strict inside, and every public symbol of FULLY_TYPED with a type that no checker has to guess."""
    strict = succeeds("basedpyright", "--warnings")
    incomplete = [problem for package in FULLY_TYPED for problem in untyped_symbols(package)]
    return report(incomplete) and strict


def untyped_symbols(package: str) -> Iterator[str]:
    """The public symbols of an installed package whose type is not written down."""
    command = ("basedpyright", "--verifytypes", package, "--ignoreexternal", "--outputjson")
    output = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True).stdout
    completeness = json.loads(output)["typeCompleteness"]
    if not completeness["symbols"]:
        yield f"{package}: no public symbol found; is it installed, with py.typed?"
    for symbol in completeness["symbols"]:
        if symbol["isExported"] and not symbol["isTypeKnown"] and "._proto." not in symbol["name"]:
            reasons = "; ".join(diagnostic["message"].splitlines()[0] for diagnostic in symbol["diagnostics"])
            yield f"{symbol['name']}: {reasons or 'type not known'}"


def imports() -> bool:
    """import-linter: imports go one way, and no framework below gym-serve."""
    return succeeds("lint-imports", "--no-logo")


def spelling() -> bool:
    """codespell."""
    return succeeds("codespell", *(name for name in tracked_files() if not name.endswith(".lock")))


def length() -> bool:
    """A file that passes 600 lines has two ideas in it."""
    problems = []
    for name in tracked_files():
        if name.endswith(".py") and GENERATED not in name:
            num_lines = (REPOSITORY / name).read_bytes().count(b"\n")
            if num_lines > MAX_LINES:
                problems.append(f"{name}: {num_lines} lines, more than {MAX_LINES}: find the second idea in it")
    return report(problems)


def addresses() -> bool:
    """No registry's address and no lock that names one: where packages come from is each reader's own choice."""
    problems = ["uv.lock is tracked: it names a registry"] if "uv.lock" in tracked_files() else []
    for name in tracked_files():
        if name == Path(__file__).relative_to(REPOSITORY).as_posix():
            continue
        try:
            text = (REPOSITORY / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if ADDRESS.search(line):
                problems.append(f"{name}:{number}: a registry's address: {line.strip()[:120]}")
    return report(problems)


def protos() -> bool:
    """buf: names, formatting, and nothing that breaks a released client."""
    return succeeds(sys.executable, "tools/check_protos.py")


def stubs() -> bool:
    """The committed stubs are what the protos give."""
    return succeeds(sys.executable, "tools/generate_stubs.py", "--check")


def lock(*, write: bool = False) -> bool:
    """requirements.lock is what the workspace resolves to: names, versions and hashes, no address."""
    export = subprocess.run(
        ("uv", "export", "--quiet", "--no-header", "--no-annotate", "--no-emit-workspace"),
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
    )
    if export.returncode:
        return report([export.stderr.strip()])
    if ADDRESS.search(export.stdout):
        return report(["the export names an address: unset the index or find-links settings of uv and try again"])
    if write:
        LOCK.write_text(export.stdout, encoding="utf-8")
    if not LOCK.is_file() or LOCK.read_text(encoding="utf-8") != export.stdout:
        return report(["requirements.lock is not what the workspace resolves to: uv run tools/check.py lock --write"])
    return True


TASKS: dict[str, Callable[[], bool]] = {
    task.__name__: task for task in (lint, types, imports, spelling, length, addresses, protos, stubs, lock)
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the repository's quality gates.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"any of: {', '.join(TASKS)}; all when not given")
    parser.add_argument("--write", action="store_true", help="let `lock` write requirements.lock")
    options = parser.parse_args()
    chosen: list[str] = options.tasks or list(TASKS)
    if unknown := [name for name in chosen if name not in TASKS]:
        parser.error(f"no such task: {', '.join(unknown)}; the tasks are {', '.join(TASKS)}")
    failed: list[str] = []
    for name in chosen:
        print(f"── {name}", flush=True)
        start = time.monotonic()
        passed = lock(write=True) if name == "lock" and options.write else TASKS[name]()
        print(f"   {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
        if not passed:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
