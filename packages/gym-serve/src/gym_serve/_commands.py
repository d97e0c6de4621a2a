"""The commands of this package, with their one-line summaries. Loads nothing heavy."""

from __future__ import annotations

from gym_sdk.cli import Command

COMMANDS: dict[str, Command] = {
    "serve": Command(
        "Serve a model and its adapters, and run fine-tuning jobs, over HTTP and gRPC", "gym_serve.cli.serve:serve"
    ),
}
