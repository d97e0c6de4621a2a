"""The study in the simulated world, as functions for the tests and as a command that prints the table of the guide.

    python packages/gym-trainer/tests/experience/study.py --seeds 100:120 --calls 1000,2000 --gepa 2000,4000

A run is about 2,000 calls in this process and takes two to four seconds of one core as long as its journal, which
syncs every answer, lies in memory: the runs' folders are made below /dev/shm where there is one.

Seeds 0 to 5 were used while the optimiser was made; the figures of the guide come from seeds 100 to 119.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from harness import run_in_process
from simworld import student, teacher
from simworld.language import Statement, find_attempts, find_questions, read_statements
from simworld.server import Service
from simworld.tasks import Task, World

from gym_data.experience import Experience, ExperienceLibrary, read_library
from gym_trainer.experience.statistics import paired_interval
from gym_trainer.rewards.text import last_number

NUM_TRAIN, NUM_GATE, NUM_TEST = 60, 100, 200
INSTRUCTION = "Answer the question. Show your working."
HARMFUL = teacher.Faults(harmful=0.8)
FAULTLESS = teacher.Faults(wrong=0.0, harmful=0.0, duplicate=0.0, overfitted=0.0)
CLEAR = student.Habits(hides=0.0)
TRUE: dict[str, Any] = {"teacher_faults": FAULTLESS, "habits": CLEAR}
"""Lessons that are nearly all true: nothing is spoilt, and no reason has to be guessed."""

IN_MEMORY = Path("/dev/shm")

ARMS: dict[str, dict[str, Any]] = {
    "gated": {},
    "gate off": {"gate": {"enabled": False}},
    "trial only": {"gate": {"held_out": False}},
    "held-out test only": {"gate": {"trial_attempts": 0}},
    "groups of one": {"group_size": 1},
    "paper": {"preset": "paper"},
    "harmful teacher, gated": {"teacher_faults": HARMFUL},
    "harmful teacher, gate off": {"teacher_faults": HARMFUL, "gate": {"enabled": False}},
    "harmful teacher, trial only": {"teacher_faults": HARMFUL, "gate": {"held_out": False}},
    "shuffled rewards, gated": {"shuffled": True},
    "shuffled rewards, trial only": {"shuffled": True, "gate": {"held_out": False}},
    "shuffled rewards, gate off": {"shuffled": True, "gate": {"enabled": False}},
    "no answers: majority": {"ground_truth": "majority", "gate": {"held_out": False}},
    "no answers: majority, gate off": {"ground_truth": "majority", "gate": {"enabled": False}},
    "no answers: critique": {"ground_truth": "critique", "gate": {"enabled": False}},
    # What keeps the arms without a gate from learning: the teacher's faults, the student's hidden reasons, which the
    # teacher has to guess, or the algorithm.
    "gate off, faultless teacher": {"gate": {"enabled": False}, "teacher_faults": FAULTLESS},
    "gate off, clear student": {"gate": {"enabled": False}, "habits": CLEAR},
    "true lessons, gate off": {"gate": {"enabled": False}, **TRUE},
    "true lessons, critique": {"ground_truth": "critique", "gate": {"enabled": False}, **TRUE},
    "true lessons, critique that can judge": {
        "ground_truth": "critique",
        "gate": {"enabled": False},
        "service": "judging",
        **TRUE,
    },
    "true lessons, paper": {"preset": "paper", **TRUE},
    "true lessons, paper, plain summaries": {"preset": "paper", "service": "plain summaries", **TRUE},
    "paper, plain summaries": {"preset": "paper", "service": "plain summaries"},
}


class JudgingService(Service):
    """A teacher that can tell right attempts from wrong ones where it is given no grades, as a strong model may."""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as the frozen world does, with the grades written into the request first."""
        messages = [dict(message) for message in body["messages"]]
        if body["model"] == "teacher" and "No grades are known" in messages[0]["content"]:
            text = messages[0]["content"]
            (_, question), *_ = find_questions(text)
            for number, attempt in enumerate(find_attempts(text), 1):
                verdict = "correct" if attempt.answer == self.world.solve(question) else "wrong"
                text = text.replace(f"Attempt {number}:\n", f"Attempt {number} ({verdict}):\n")
            messages[0]["content"] = text
        return super().complete({**body, "messages": messages})


class PlainSummaries(Service):
    """A teacher whose summaries do not say the grade again.

    The frozen one ends them with "It is right.", and when it compares several takes that for the grade of the attempt
    that follows: with a summary of every attempt it learns from grades that are shifted by one.
    """

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as the frozen world does, without that sentence."""
        answer = super().complete(body)
        message = answer["choices"][0]["message"]
        message["content"] = re.sub(r"\nIt is (?:right|wrong)\.(?=\nUsed:)", "", message["content"])
        return answer


SERVICES = {"frozen": Service, "judging": JudgingService, "plain summaries": PlainSummaries}


def train(
    seed: int,
    *,
    teacher_faults: teacher.Faults | None = None,
    shuffled: bool = False,
    service: str = "frozen",
    habits: student.Habits | None = None,
    gate: dict[str, Any] | None = None,
    num_gate: int = NUM_GATE,
    **method: Any,
) -> tuple[dict[str, Any], ExperienceLibrary, World]:
    """One run in world `seed`; the report, the library and the world."""
    world = World.make(seed)
    if shuffled:
        method["reward"] = {"kind": "python", "function": "study:shuffled_reward"}
    options: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 30,
        "report": {"worth_questions": 0, "baselines": []},
        "num_train": NUM_TRAIN + num_gate,
        "num_test": 0,
        "gate": {"share": num_gate / (NUM_TRAIN + num_gate), **(gate or {})},
        **method,
    }
    gate_spec = options["gate"]
    if False in (gate_spec.get("enabled"), gate_spec.get("held_out")) or options.get("preset") == "paper":
        options["num_train"] = NUM_TRAIN
        options["gate"].pop("share")
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        endpoint = SERVICES[service](
            world, habits=habits or student.Habits(), faults=teacher_faults or teacher.Faults()
        )
        report, run = run_in_process(Path(folder), endpoint, **options)
        return report, read_library(run.path / "experience"), world


def shuffled_reward(answer: str, reference: str, question: str) -> float:
    """A reward that has nothing to do with the answer: right as often as the student is, decided by chance."""
    return float(random.Random(f"{answer}\0{question}").random() < 0.27)


def accuracy(world: World, guidance: str, tasks: Sequence[Task] | None = None, *, seed: int = 1) -> float:
    """The share of test tasks that are answered right with a system message."""
    tasks = world.tasks("test", NUM_TEST) if tasks is None else tasks
    right = 0
    for task in tasks:
        messages = [{"role": "system", "content": guidance}] if guidance else []
        reply = student.reply(world, [*messages, {"role": "user", "content": task.question}], seed)
        right += last_number(reply) == task.answer
    return right / len(tasks)


def oracle_library(world: World) -> ExperienceLibrary:
    return ExperienceLibrary(items=tuple(Experience(name=name, text=text) for name, text in world.oracle()))


def shuffle_words(library: ExperienceLibrary, seed: int) -> ExperienceLibrary:
    """The same words in the same number of items, in no order."""
    words = " ".join(item.text for item in library.items).split()
    random.Random(seed).shuffle(words)
    items = []
    for number, item in enumerate(library.items):
        count = len(item.text.split())
        items.append(Experience(name=f"Item {number}", text=" ".join(words[:count])))
        words = words[count:]
    return replace(library, items=tuple(items))


def deletions(world: World, library: ExperienceLibrary) -> tuple[list[float], list[float]]:
    """How much accuracy falls when a true item is deleted: on tasks that need its rule, and on tasks that do not."""
    tasks = world.tasks("test", 600)
    drops: list[float] = []
    elsewhere: list[float] = []
    for item in library.items:
        stated = [s for s in read_statements(item.text) if isinstance(s, Statement) and s.words]
        if not stated or world.rules.get(stated[0].words[0]) != stated[0].effect:
            continue
        word = stated[0].words[0]
        lesser = replace(library, items=tuple(other for other in library.items if word not in other.text))
        for needed, out in ((True, drops), (False, elsewhere)):
            some = [task for task in tasks if (word in task.needs) is needed][:60]
            whole, part = (accuracy(world, each.render(), some) for each in (library, lesser))
            out.append(whole - part)
    return drops, elsewhere


def gepa(seed: int, max_metric_calls: int) -> tuple[str, int, World]:
    """GEPA with its own defaults on the same rows, student and teacher; the instruction and the calls it made."""
    from gepa import optimize

    world = World.make(seed)
    calls = 0

    def ask_student(messages: Sequence[Any]) -> str:
        nonlocal calls
        calls += 1
        return student.reply(world, [dict(message) for message in messages], calls)

    def ask_teacher(prompt: Any) -> str:
        nonlocal calls
        calls += 1
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return teacher.reply(messages, calls)

    class Quiet:
        def log(self, message: str) -> None: ...

    def rows(split: str, count: int) -> list[dict[str, Any]]:
        return [
            {"input": task.question, "answer": f"Answer: {task.answer}", "additional_context": {}}
            for task in world.tasks(split, count)
        ]

    # The same rows: the first of the training split, and as validation set those that the gate would get.
    everything = rows("train", NUM_TRAIN + NUM_GATE)
    result = optimize(
        seed_candidate={"instruction": INSTRUCTION},
        trainset=everything[:NUM_TRAIN],
        valset=everything[NUM_TRAIN:],
        task_lm=ask_student,
        reflection_lm=ask_teacher,
        max_metric_calls=max_metric_calls,
        logger=Quiet(),
        seed=seed,
    )
    return result.best_candidate["instruction"], calls, world


def one(job: tuple[str, int]) -> dict[str, Any]:
    """One arm in one world, as a row of figures."""
    arm, seed = job
    if arm.startswith("GEPA"):
        text, calls, world = gepa(seed, int(arm.split()[1]))
        return {"arm": arm, "seed": seed, "calls": calls, "accuracy": accuracy(world, text)}
    if arm.startswith("gated,"):
        options: dict[str, Any] = {"budget": {"training": {"calls": int(arm.split()[1])}}, "epochs": 8}
    elif arm in ("nothing", "oracle"):
        world = World.make(seed)
        text = oracle_library(world).render() if arm == "oracle" else ""
        return {"arm": arm, "seed": seed, "calls": 0, "accuracy": accuracy(world, text)}
    else:
        options = ARMS[arm]
    report, library, world = train(seed, **options)
    row = {
        "arm": arm,
        "seed": seed,
        "calls": report["money"]["training"]["calls"],
        "accuracy": accuracy(world, library.render()),
        "items": len(library.items),
    }
    if arm == "gated":
        from gym_trainer.experience.evaluation import placebo_of

        row["placebo"] = accuracy(world, placebo_of(library).render())
        row["shuffled text"] = accuracy(world, shuffle_words(library, seed).render())
        row["drops"], row["elsewhere"] = deletions(world, library)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="100:120")
    parser.add_argument("--arms", default=";".join(["nothing", "oracle", *ARMS]))
    parser.add_argument("--gepa", default="", help="budgets of metric calls, such as 2000,4000")
    parser.add_argument("--calls", default="", help="budgets of calls of the gated arm, such as 1000,2000")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="one line a run; a second call goes on where the first was ended")
    arguments = parser.parse_args()
    first, last = (int(part) for part in arguments.seeds.split(":"))
    arms = [name for name in arguments.arms.split(";") if name]
    arms += [f"gated, {calls} calls" for calls in arguments.calls.split(",") if calls]
    arms += [f"GEPA {calls}" for calls in arguments.gepa.split(",") if calls]
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        rows = [json.loads(line) for line in arguments.json.read_text(encoding="utf-8").splitlines()]
    done = {(row["arm"], row["seed"]) for row in rows}
    jobs = [(arm, seed) for arm in arms for seed in range(first, last) if (arm, seed) not in done]
    with ProcessPoolExecutor(arguments.workers) as pool:
        for future in as_completed([pool.submit(one, job) for job in jobs]):
            rows.append(future.result())
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print_table(arms, rows)


def print_table(arms: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Accuracy by arm, and how far it lies above no library in the same worlds."""
    nothing = {row["seed"]: row["accuracy"] for row in rows if row["arm"] == "nothing"}
    print("| arm | accuracy: mean | worst | best | above nothing, 95% | calls | items |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for arm in arms:
        chosen = [row for row in rows if row["arm"] == arm]
        print(_line(arm, chosen, "accuracy", nothing))
        for extra in ("placebo", "shuffled text"):
            if extra in chosen[0]:
                print(_line(f"its {extra}", chosen, extra, nothing))
    for key, where in (("drops", "tasks that need it"), ("elsewhere", "other tasks")):
        # By worlds: the items of one world share questions and draws.
        found = [-statistics.mean(row[key]) for row in rows if row.get(key)]
        if len(found) > 1:
            low, high = paired_interval(found)
            print(f"without a true item, on {where}: {statistics.mean(found):+.3f} ({low:+.3f} to {high:+.3f})")


def _line(name: str, rows: list[dict[str, Any]], key: str, nothing: dict[int, float]) -> str:
    values = [row[key] for row in rows]
    calls = statistics.mean(row["calls"] for row in rows)
    items = statistics.mean(row.get("items", 0) for row in rows)
    figures = [f"{value:.3f}" for value in (statistics.mean(values), min(values), max(values))]
    gains = [row[key] - nothing[row["seed"]] for row in rows if row["seed"] in nothing]
    low, high = paired_interval(gains)
    above = f"{low:+.3f} to {high:+.3f}" if len(gains) > 1 and any(gains) else ""
    return f"| {name} | {' | '.join(figures)} | {above} | {calls:.0f} | {items:.1f} |"


if __name__ == "__main__":
    main()
