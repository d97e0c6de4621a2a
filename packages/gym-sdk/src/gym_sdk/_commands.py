"""The commands of this package, with their one-line summaries. Loads nothing heavy."""

from __future__ import annotations

from gym_sdk.cli import Command

COMMANDS: dict[str, Command] = {
    "chat": Command("Talk to a model: a run, a daemon's, or any OpenAI-compatible one", "gym_sdk.cli.chat:chat"),
    "jobs": Command("Submit, watch and steer training runs on a daemon", "gym_sdk.cli.jobs:app"),
    "files": Command("Send and fetch files of a daemon", "gym_sdk.cli.files:app"),
    "models": Command("List, load, name and delete models of a daemon", "gym_sdk.cli.models:app"),
    "keys": Command("Make and revoke API keys of a daemon", "gym_sdk.cli.keys:app"),
    "explain": Command("Say what a field of run.yaml means", "gym_sdk.cli.spec:explain"),
    "schema": Command("Print the JSON Schema of run.yaml, for editors", "gym_sdk.cli.spec:schema"),
    "spec": Command("Check a run.yaml, or show it with every default filled in", "gym_sdk.cli.spec:app"),
}
