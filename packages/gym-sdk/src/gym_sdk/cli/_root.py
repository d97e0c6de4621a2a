"""Finds the command, imports it, runs it, and turns whatever happens into a message and an exit code."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

from gym_sdk.cli import Command
from gym_sdk.errors import UserError

USAGE = "usage: gym COMMAND [ARGUMENTS]"

GROUPS = {"gym-trainer": "Training", "gym-data": "Data", "gym-serve": "Serving", "gym-sdk": "Client and specification"}
"""Gym's own packages in the order of `gym --help`; those of others follow under their own names."""

HOMES = {
    "gym-trainer": ("train", "plan", "eval", "export", "bench", "matrix", "doctor", "experience"),
    "gym-data": ("data",),
    "gym-serve": ("serve",),
}
"""Commands that other packages bring, for the hint where one is not installed."""

EXTRAS = {"torch": "torch", "transformers": "torch", "peft": "torch", "accelerate": "torch", "safetensors": "torch"}
"""The extra that brings a module."""


def run(arguments: Sequence[str]) -> int:
    """Run one `gym` command line; returns the exit code. Prints, and never raises."""
    # The import costs; it pays for every path below except help.
    from gym_sdk.cli._failures import report

    try:
        code = _dispatch(list(arguments))
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - the one place where every failure becomes a message
        return report(error, arguments)
    return code


def find_commands() -> dict[str, dict[str, Command]]:
    """The commands of every installed package, by package."""
    found = {}
    for point in importlib.metadata.entry_points(group="gym.commands"):
        try:
            found[point.name] = point.load()
        except Exception as error:  # noqa: BLE001 - one broken package must not take every command away
            sys.stderr.write(f"warning: the commands of {point.name} cannot be loaded: {error}\n")
    ordered = [*(name for name in GROUPS if name in found), *sorted(name for name in found if name not in GROUPS)]
    return {name: found[name] for name in ordered}


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first == "help":
        arguments = [*arguments[1:2], "--help"]
        first = arguments[0]
    if first in ("--help", "-h"):
        sys.stdout.write(help_text(find_commands()))
        return 0
    if first in ("--version", "-V"):
        sys.stdout.write(_versions())
        return 0
    commands = {name: command for group in find_commands().values() for name, command in group.items()}
    if first not in commands:
        raise _unknown(first, list(commands))
    return _invoke(first, commands[first], arguments[1:])


def help_text(packages: dict[str, dict[str, Command]]) -> str:
    """The text of `gym --help`."""
    width = max((len(name) for group in packages.values() for name in group), default=0)
    lines = ["Fine-tune language models cheaply, understand what happened, and serve the result.", "", USAGE]
    for package, group in packages.items():
        if group:
            lines += ["", f"{GROUPS.get(package, package)}:"]
            lines += [f"  {name:<{width}}  {command.summary}" for name, command in group.items()]
    lines += ["", "`gym COMMAND --help` says more. `gym --version` names the installed packages."]
    return "\n".join(lines) + "\n"


def _versions() -> str:
    packages = [package for package in ("gym-sdk", "gym-data", "gym-serve", "gym-trainer") if _is_installed(package)]
    return "".join(f"{package} {importlib.metadata.version(package)}\n" for package in packages)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _unknown(name: str, installed: list[str]) -> UserError:
    if name.startswith("-"):
        return UserError(f"unknown option {name}", hint=f"{USAGE}; `gym --help` lists the commands")
    for package, names in HOMES.items():
        if name in names and not _is_installed(package):
            wanted = package if package == "gym-data" else f"{package}[torch]"
            return UserError(f"gym {name} comes with {package}, which is not installed", hint=f'pip install "{wanted}"')
    known = [*installed, *(each for names in HOMES.values() for each in names)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean gym {near[0]}?" if near else "`gym --help` lists the commands"
    return UserError(f"there is no command {name}", hint=hint)


def _invoke(name: str, command: Command, arguments: list[str]) -> int:
    module_name, _, attribute = command.target.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        package = module_name.partition(".")[0].replace("_", "-")
        raise UserError(
            f"gym {name} needs {missing}, which is not installed",
            hint=f'pip install "{package}[{EXTRAS[missing]}]"',
        ) from None
    from cyclopts import App, CycloptsError

    app = target if isinstance(target, App) else _app_of(name, target)
    app.suppress_keyboard_interrupt = False
    try:
        result: Any = app(
            arguments, exit_on_error=False, print_error=False, verbose=False, result_action="return_value"
        )
    except CycloptsError as error:
        chain = " ".join(["gym", name, *(error.command_chain or [])])
        raise UserError(str(error).rstrip("."), hint=f"{chain} --help") from None
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _app_of(name: str, function: Any) -> Any:
    from cyclopts import App

    app = App(name=f"gym {name}", version_flags=[])
    app.default(function)
    return app
