"""The commands of this package, with their one-line summaries. Loads nothing heavy."""

from __future__ import annotations

from gym_sdk.cli import Command

COMMANDS: dict[str, Command] = {
    "plan": Command("Say what a run needs and how fast it will be", "gym_trainer.cli.plan:plan"),
    "experience": Command("Show, merge, restore and replay experience libraries", "gym_trainer.cli.experience:app"),
}
