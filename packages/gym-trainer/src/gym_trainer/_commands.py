"""The commands of this package, with their one-line summaries. Loads nothing heavy."""

from __future__ import annotations

from gym_sdk.cli import Command

COMMANDS: dict[str, Command] = {
    "train": Command("Fine-tune a model as a specification says, or go on with a run", "gym_trainer.cli.train:train"),
    "bench": Command("Measure training on this machine", "gym_trainer.cli.bench:app"),
    "plan": Command("Say what a run needs and how fast it will be", "gym_trainer.cli.plan:plan"),
    "export": Command("Write a run's result as a merged model or a GGUF file", "gym_trainer.cli.export:export"),
    "matrix": Command("Try every architecture that transformers knows", "gym_trainer.cli.matrix:matrix"),
    "eval": Command("Measure a run's result again", "gym_trainer.cli.evaluate:evaluate"),
    "doctor": Command("Say what this machine can do and what is missing", "gym_trainer.cli.doctor:doctor"),
    "experience": Command("Show, merge, restore and replay experience libraries", "gym_trainer.cli.experience:app"),
}
