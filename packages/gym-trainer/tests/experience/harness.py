"""What the tests share: data files and specifications of a simulated world, and its service without a socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from simworld.server import Service
from simworld.tasks import World

from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, spec_from_data
from gym_trainer.experience.run import Network, train_experience

ANSWER = r"Answer: (-?\d+)"


def write_split(world: World, split: str, count: int, path: Path) -> Path:
    rows = [{"question": task.question, "answer": str(task.answer)} for task in world.tasks(split, count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def world_spec(
    folder: Path,
    world: World,
    *,
    num_train: int = 60,
    num_test: int = 100,
    base_url: str = "http://127.0.0.1:1/v1",
    **method: Any,
) -> RunSpec:
    """A specification on files of `world`; 60 training questions of which 40% make the gate, unless told otherwise."""
    train = write_split(world, "train", num_train, folder / "train.jsonl")
    test = write_split(world, "test", num_test, folder / "test.jsonl")
    filled: dict[str, Any] = {
        "kind": "training_free_grpo",
        "student": {"base_url": base_url, "model": "student"},
        "teacher": {"base_url": base_url, "model": "teacher"},
        "reward": {"kind": "numeric", "extract": ANSWER},
        "question_field": "question",
        "answer_field": "answer",
        "epochs": 1,
        "batch_size": 20,
        "lessons_per_question": 2,
        "pruning": {"enabled": False},
        "rollout": {"max_tokens": 200},
        "evaluation": {"max_tokens": 200},
        "updater": {"temperature": 0.0, "max_tokens": 800},
    }
    for key, value in method.items():
        together = isinstance(filled.get(key), dict) and isinstance(value, dict) and "kind" not in value
        filled[key] = {**filled[key], **value} if together else value
    return spec_from_data(
        {
            "name": "world",
            "model": {"source": "student"},
            "method": filled,
            "data": {
                "train": [{"source": str(train)}],
                "eval": {"sources": [{"source": str(test)}] if num_test else []},
            },
            "output": {"dir": str(folder / "runs")},
            "seed": world.seed,
        }
    )


def transport_of(
    complete: Callable[[dict[str, Any]], dict[str, Any]], seen: list[dict[str, Any]] | None = None
) -> httpx.MockTransport:
    """The chat API in this process: no socket, the same requests."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"object": "list", "data": []})
        body = json.loads(request.content)
        if seen is not None:
            seen.append(body)
        return httpx.Response(200, json=complete(body))

    return httpx.MockTransport(handle)


def run_in_process(
    folder: Path, service: Service, seen: list[dict[str, Any]] | None = None, **options: Any
) -> tuple[dict[str, Any], RunDir]:
    """Train on a world without a socket; the report and the run directory."""
    spec = world_spec(folder, service.world, **options)
    run = RunDir.create(spec.output.dir, spec.name)
    return train_experience(spec, run, network=Network(transport=transport_of(service.complete, seen))), run
