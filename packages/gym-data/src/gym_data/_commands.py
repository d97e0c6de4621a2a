"""The commands of this package, with their one-line summaries. Loads nothing heavy."""

from __future__ import annotations

from gym_sdk.cli import Command

COMMANDS: dict[str, Command] = {
    "data": Command("Look at data sets and change them", "gym_data.cli.app:app"),
}
