"""The commands of this package, with their one-line summaries. Loads nothing heavy."""

from __future__ import annotations

from gym_sdk.cli import Command

COMMANDS: dict[str, Command] = {
    "explain": Command("Say what a field of run.yaml means", "gym_sdk.cli.spec:explain"),
    "schema": Command("Print the JSON Schema of run.yaml, for editors", "gym_sdk.cli.spec:schema"),
    "spec": Command("Check a run.yaml, or show it with every default filled in", "gym_sdk.cli.spec:app"),
}
