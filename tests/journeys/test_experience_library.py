"""Guards a library of experiences on its way: learned by a real job, it is served in the prompt of its training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from model_folder import write_model
from rpc_client import RpcClient, chat_input
from simworld import server as simworld_server
from simworld.tasks import World

from gym_data.experience import read_library
from gym_sdk._proto.gym.v1 import inference_pb2
from gym_sdk.client import Gym
from gym_sdk.client.types import JobState, ModelKind

SEED = 3
SPEC = """
name: learned
method:
  kind: training_free_grpo
  student: {{base_url: "{url}", model: student}}
  teacher: {{base_url: "{url}", model: teacher}}
  instruction: Answer with a number.
  reward: {{kind: numeric, extract: 'Answer: (-?\\d+)'}}
  question_field: question
  answer_field: answer
  epochs: 1
  group_size: 3
  batch_size: 10
  lessons_per_question: 2
  rollout: {{max_tokens: 200}}
  evaluation: {{max_tokens: 200}}
  updater: {{max_tokens: 800}}
  gate: {{enabled: false}}
  report: {{worth_questions: 0, baselines: []}}
data:
  train: [{{source: train.jsonl}}]
  eval: {{sources: [{{source: test.jsonl}}]}}
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """The simulated student and teacher behind the chat API."""
    world = subprocess.Popen(
        [sys.executable, simworld_server.__file__, json.dumps({"seed": SEED})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert world.stdout is not None
    yield f"http://127.0.0.1:{world.stdout.readline().strip()}/v1"
    world.communicate()


def prompt(rpc: RpcClient, model: str, chat: list[dict[str, str]]) -> inference_pb2.TokenizeChatResponse:
    request = inference_pb2.TokenizeChatRequest(input=chat_input(model, chat))
    return rpc.call("InferenceService", "TokenizeChat", request)


def write_rows(world: World, split: str, count: int, path: Path) -> None:
    rows = [{"question": task.question, "answer": str(task.answer)} for task in world.tasks(split, count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_what_a_job_learned_is_served_in_the_prompt_of_its_training(endpoint: str, tmp_path: Path) -> None:
    world = World.make(SEED)
    write_rows(world, "train", 20, tmp_path / "train.jsonl")
    write_rows(world, "test", 10, tmp_path / "test.jsonl")
    (tmp_path / "run.yaml").write_text(SPEC.format(url=endpoint), encoding="utf-8")
    settings = "[jobs]\ncommand = []\n"
    model = write_model(tmp_path / "models" / "student")
    with (
        DaemonProcess(tmp_path / "data", str(model), settings=settings) as daemon,
        Gym(daemon.grpc_target, api_key=daemon.wait_ready().key) as gym,
        ExitStack() as stack,
    ):
        job = gym.jobs.create(tmp_path / "run.yaml").wait(timeout_s=120)
        assert job.state is JobState.SUCCEEDED
        served = gym.models.get(job.model_id)
        assert (served.kind, served.base_model_id) == (ModelKind.EXPERIENCES, "student")
        folder = job.artifact("experiences").download(tmp_path / "experience")
        library = read_library(folder)
        assert library.items

        (journal,) = daemon.data_dir.glob("jobs/*/runs/*/journal.jsonl")
        entries = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
        sent = [entry["body"]["messages"] for entry in entries if entry["type"] == "request" and "body" in entry]
        text = library.render()
        with_library = [messages for messages in sent if any(text in turn["content"] for turn in messages)]
        assert len(with_library) >= 10, "the test questions were asked with the library"
        rpc = stack.enter_context(RpcClient(daemon.grpc_address, daemon.key))
        for messages in with_library[:10]:
            question = [
                {"role": "system", "content": "Answer with a number."},
                *(turn for turn in messages if turn["role"] == "user"),
            ]
            served_prompt, trained_prompt = prompt(rpc, job.model_id, question), prompt(rpc, "student", messages)
            assert served_prompt.token_ids == trained_prompt.token_ids
            assert text in served_prompt.text
