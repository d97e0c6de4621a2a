"""Running the tasks of a specification on a model in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gym_data import ChatRenderer, Tokenizer
from gym_sdk.errors import DataError
from gym_sdk.spec import JsonFieldsTask, RunSpec
from gym_trainer.evaluation.json_fields import JsonFieldsResult, Question, judge, questions, summarise
from gym_trainer.evaluation.speed import merged_for_generation

MAX_SLOTS = 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its rows read and its prompts rendered, before any model is loaded."""

    name: str
    spec: JsonFieldsTask
    questions: list[Question]
    prompts: list[list[int]]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return max(len(prompt) for prompt in self.prompts) + self.spec.max_new_tokens


def load_tasks(spec: RunSpec, renderer: ChatRenderer) -> list[Task]:
    """The tasks of a specification, with every mistake in their data found.

    Raises:
        DataError: a row that is not what its task needs.
    """
    tasks: list[Task] = []
    for number, task in enumerate(spec.evaluation.tasks, start=1):
        name = task.kind if len(spec.evaluation.tasks) == 1 else f"{task.kind} {number}"
        asked = questions(task)
        try:
            prompts = [renderer.encode_prompt(q.messages, q.tools_json) for q in asked]
        except DataError as error:
            raise DataError(error.message, where=error.where, hint=error.hint) from None
        tasks.append(Task(name=name, spec=task, questions=asked, prompts=prompts))
    return tasks


def run_tasks(
    tasks: list[Task],
    model: Any,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[JsonFieldsResult]:
    """Answer every question greedily and judge the answers. The model is given back as it was."""
    from gym_serve.engines.base import GenerationRequest, SamplingParams, generate_all
    from gym_serve.engines.transformers import TransformersEngine

    total = sum(len(task.questions) for task in tasks)
    results: list[JsonFieldsResult] = []
    done = 0
    on_progress(0, total)
    with (
        merged_for_generation(model) as merged,
        TransformersEngine(merged, max_slots=MAX_SLOTS, context_length=max(t.longest for t in tasks) + 1) as engine,
    ):
        for task in tasks:
            requests = [
                GenerationRequest(
                    prompt_ids=prompt,
                    max_tokens=task.spec.max_new_tokens,
                    stop_ids=frozenset(stop_ids),
                    sampling=SamplingParams(temperature=0.0),
                )
                for prompt in task.prompts
            ]
            started_s = time.monotonic()
            completions = generate_all(
                engine, requests, on_progress=lambda here, _, before=done: on_progress(before + here, total)
            )
            answers = []
            for question, completion in zip(task.questions, completions, strict=True):
                ended = completion.finish.reason == "stop"
                ids = completion.token_ids[:-1] if ended else completion.token_ids
                text = tokenizer.decode(ids)
                answers.append(judge(question, text, num_tokens=len(completion.token_ids), ended=ended))
            results.append(summarise(task.name, answers, time.monotonic() - started_s))
            done += len(requests)
    return results
