"""GEPA beside a finished run of training-free GRPO: the same endpoint, rows, splits, reward and number of calls.

    python packages/gym-trainer/tests/experience/gepa_on_run.py RUN

GEPA (package `gepa`, its own defaults) starts from the run's instruction; its training set is the run's training
questions, its validation set the gate's, its reflection model the run's teacher. It ends with the iteration in which
its calls, of student and teacher together, reach those that the run spent on training. The instruction it likes best is
measured on the run's test questions, with the sampling of the run's own report. Answers are kept in RUN/gepa.jsonl, so
that a killed comparison goes on without asking again. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
from gepa import optimize
from gepa.adapters.default_adapter.default_adapter import DefaultAdapter, EvaluationResult

from gym_sdk.client.settings import local_key_for
from gym_sdk.spec import EndpointSpec, SamplingSpec, TrainingFreeGrpo, load_spec
from gym_trainer.experience.questions import Question, load_splits
from gym_trainer.rewards import build_reward

SEED_INSTRUCTION = "Answer the question."


class Answers:
    """Answers by the digest of what was asked, in a file that survives a kill."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in map(json.loads, lines)}

    def get(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def add(self, entry: dict[str, Any]) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


class Endpoint:
    """The chat API, counted: every answer is one call, from the file of answers or not."""

    def __init__(self, spec: EndpointSpec, model: str, seed: int, answers: Answers) -> None:
        self._url, self._model, self._seed = f"{spec.base_url.rstrip('/')}/chat/completions", model, seed
        self._answers, self._lock = answers, Lock()
        self.calls = self.truncated = 0
        key = os.environ.get(spec.api_key_env or "GYM_API_KEY") or local_key_for(spec.base_url)
        self._http = httpx.Client(timeout=spec.timeout_s, headers={"authorization": f"Bearer {key}"} if key else {})

    def ask(self, messages: Sequence[Any], sampling: SamplingSpec, draw: str) -> str:
        digest = hashlib.sha256(f"{self._seed}\0{draw}\0{messages[-1]['content']}".encode()).digest()
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": int.from_bytes(digest[:4], "big") >> 1,
        }
        if sampling.top_p is not None:
            body["top_p"] = sampling.top_p
        key = hashlib.sha256(json.dumps([self._url, draw, body], sort_keys=True).encode()).hexdigest()
        entry = self._answers.get(key)
        if entry is None:
            response = self._http.post(self._url, json=body)
            response.raise_for_status()
            choice = response.json()["choices"][0]
            entry = {"key": key, "text": choice["message"]["content"] or "", "finish_reason": choice["finish_reason"]}
            self._answers.add(entry)
        with self._lock:
            self.calls += 1
            self.truncated += entry["finish_reason"] == "length"
        return entry["text"]


class Together(DefaultAdapter):
    """GEPA's own adapter, with the answers of a batch asked for at the same time."""

    def __init__(self, ask: Callable[[Sequence[Any], str], str], evaluator: Any, concurrency: int) -> None:
        self._ask, self._concurrency = ask, concurrency
        self._answers: Iterator[str] = iter(())
        self._asked = 0
        super().__init__(model=lambda messages: next(self._answers), evaluator=evaluator)

    def evaluate(self, batch: list[Any], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """The answers of the batch, in its order, then their scores."""
        (instruction,) = candidate.values()
        prompts = [
            [{"role": "system", "content": instruction}, {"role": "user", "content": row["input"]}] for row in batch
        ]
        draws = [f"gepa/{self._asked + number}" for number in range(len(batch))]
        self._asked += len(batch)
        with ThreadPoolExecutor(self._concurrency) as pool:
            self._answers = iter(list(pool.map(self._ask, prompts, draws)))
        return super().evaluate(batch, candidate, capture_traces)


class Quiet:
    """GEPA's log, unheard."""

    def log(self, message: str) -> None: ...


def compare(run: Path, calls: int | None) -> dict[str, Any]:
    """The figures of GEPA beside those of the run's report."""
    spec = load_spec(run / "spec.yaml")
    method = spec.method
    assert isinstance(method, TrainingFreeGrpo)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    splits, reward = load_splits(spec, method), build_reward(method.reward)
    answers = Answers(run / "gepa.jsonl")
    student = Endpoint(method.student, method.student.model or spec.model.source, spec.seed, answers)
    teacher_spec = method.teacher or method.student
    teacher = Endpoint(teacher_spec, teacher_spec.model or spec.model.source, spec.seed, answers)
    run_calls = report["money"]["training"]["calls"]
    most_calls = run_calls if calls is None else calls
    fenced = 0

    def evaluate(data: Any, response: str) -> EvaluationResult:
        score = reward.score(response, data["answer"], data["input"])
        verdict = "correct" if score >= 0.5 else f"incorrect. The correct answer is '{data['answer']}'"
        return EvaluationResult(score=score, feedback=f"The generated response is {verdict}.", objective_scores=None)

    def rows(questions: Sequence[Question]) -> list[dict[str, Any]]:
        return [{"input": q.text, "answer": q.reference, "additional_context": {}} for q in questions]

    def reflect(prompt: Any) -> str:
        nonlocal fenced
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = teacher.ask(messages, method.updater, f"reflect/{teacher.calls}")
        fenced += text.count("```") >= 2
        return text

    result = optimize(
        seed_candidate={"instruction": method.instruction or SEED_INSTRUCTION},
        trainset=rows(splits.train),
        valset=rows(splits.gate),
        adapter=Together(
            lambda messages, draw: student.ask(messages, method.rollout, draw),
            evaluate,
            method.student.max_concurrency,
        ),
        reflection_lm=reflect,
        stop_callbacks=lambda state: student.calls + teacher.calls >= most_calls,
        logger=Quiet(),
        seed=spec.seed,
    )
    spent = {
        "gepa_calls": student.calls + teacher.calls,
        "gepa_answers_cut_off": student.truncated,
        "gepa_reflections": teacher.calls,
        "gepa_reflections_cut_off": teacher.truncated,
        "gepa_reflections_without_the_asked_for_block": teacher.calls - fenced,
    }
    instruction = result.best_candidate["instruction"]

    def score(question: Question) -> float:
        messages = [{"role": "system", "content": instruction}, {"role": "user", "content": question.text}]
        answer = student.ask(messages, method.evaluation, "test/0")
        return reward.score(answer, question.reference or "", question.text)

    with ThreadPoolExecutor(method.student.max_concurrency) as pool:
        scores = list(pool.map(score, splits.test))
    return {
        "run": {arm["name"]: arm["accuracy"] for arm in report["accuracy"]},
        "run_training_calls": run_calls,
        "gepa_accuracy": round(statistics.fmean(scores), 4),
        **spent,
        "gepa_validation_accuracy": max(result.val_aggregate_scores),
        "gepa_candidates": len(result.candidates),
        "num_test_questions": len(scores),
        "instruction": instruction,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--calls", type=int, help="calls of GEPA; those of the run's training when not given")
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.run, arguments.calls), ensure_ascii=False))
