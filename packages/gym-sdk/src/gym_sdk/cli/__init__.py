"""The `gym` command.

A package adds commands by an entry point of the group `gym.commands` that points at a dict of `Command`s in a module
that loads nothing heavy:

    # pyproject.toml
    [project.entry-points."gym.commands"]
    gym-trainer = "gym_trainer._commands:COMMANDS"

    # gym_trainer/_commands.py
    from gym_sdk.cli import Command

    COMMANDS = {"train": Command("Fine-tune a model as run.yaml says", "gym_trainer.cli.train:train")}

The target is imported when the command is invoked. It is a function whose parameters cyclopts turns into arguments, or
a `cyclopts.App` with commands of its own. What it returns is the exit code (None is 0).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["Command", "main"]


@dataclass(frozen=True)
class Command:
    """An entry of the `gym` command."""

    summary: str
    """One line for `gym --help`, without a full stop."""
    target: str
    """`module:function` or `module:app`, imported when invoked."""


def main(arguments: list[str] | None = None) -> None:
    """Run the `gym` command and exit."""
    from gym_sdk.cli._root import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
