"""Guards the simulated world itself: what the student reads, and that the teacher learns from contrasts only."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import statistics
from pathlib import Path

import pytest
from simworld import student, teacher
from simworld.language import Effect, Statement, find_attempts, find_questions, read_statements
from simworld.tasks import Task, World


def accuracy(world: World, guidance: str, count: int = 120, split: str = "test") -> float:
    right = []
    for task in world.tasks(split, count):
        messages = [{"role": "system", "content": guidance}, {"role": "user", "content": task.question}]
        right.append(student.reply(world, messages, seed=1).endswith(f"Answer: {task.answer}"))
    return statistics.mean(right)


@pytest.mark.parametrize(
    ("text", "effect"),
    [
        ("When Tormel is mentioned, add 5 to the fee.", Effect("add", 5)),
        ("If the flag is Tormel, there is a surcharge of seven marks.", Effect("add", 7)),
        ("Raise the total by 4 whenever you see Tormel.", Effect("add", 4)),
        ("Tormel: take 3 off.", Effect("subtract", 3)),
        ("Reduce the bill by 2 if Tormel appears.", Effect("subtract", 2)),
        ("With Tormel, double the amount.", Effect("multiply", 2)),
        ("For Tormel multiply the running total by three.", Effect("multiply", 3)),
        ("Under Tormel, put 2 marks per crate on top.", Effect("per_unit", 2)),
        ("If Tormel appears, leave the total as it is.", Effect("none")),
        ("For Tormel, never add 5.", Effect("none")),
    ],
)
def test_a_rule_is_understood_in_many_wordings(text: str, effect: Effect) -> None:
    assert read_statements(text) == (Statement(("Tormel",), effect),)


@pytest.mark.parametrize(
    "text",
    [
        "Tormel is a lovely word and so is 5.",
        "Be careful with every order and check your working twice.",
        "add Tormel 5 the when is to mentioned fee",
        "Tormel 5.",
    ],
)
def test_text_that_states_no_rule_says_nothing(text: str) -> None:
    assert read_statements(text) == ()


def test_the_oracle_is_far_above_nothing_and_shuffled_words_are_not() -> None:
    nothing, oracle, shuffled = [], [], []
    for seed in range(4):
        world = World.make(seed)
        text = "\n".join(f"[{i}] {name}: {rule}" for i, (name, rule) in enumerate(world.oracle(), 1))
        words = text.split()
        random.Random(seed).shuffle(words)
        nothing.append(accuracy(world, ""))
        oracle.append(accuracy(world, text))
        shuffled.append(accuracy(world, " ".join(words)))
    assert statistics.mean(oracle) > 0.7
    assert statistics.mean(nothing) < 0.35
    assert abs(statistics.mean(shuffled) - statistics.mean(nothing)) < 0.05


def test_worlds_share_no_words() -> None:
    words = [World.make(seed).lexicon for seed in range(20)]
    shared = sum(len(a & b) for i, a in enumerate(words) for b in words[:i])
    assert shared <= 5, "20 worlds of 25 words each may collide by chance only"


def test_questions_read_back_and_answers_follow_from_the_rules() -> None:
    world = World.make(5)
    for task in world.tasks("train", 30):
        (_, question), *rest = find_questions(task.question)
        assert not rest
        assert len(question.words) == 5
        assert world.solve(question) == task.answer
        assert {word for word in question.words if word in world.rules} == set(task.needs)
        assert 1 <= len(task.needs) <= 3


def test_splits_do_not_overlap() -> None:
    world = World.make(1)
    train, test = ({task.question for task in world.tasks(split, 200)} for split in ("train", "test"))
    assert not train & test


def test_the_teacher_module_knows_no_rules() -> None:
    tree = ast.parse((Path(teacher.__file__)).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "simworld.tasks" not in imported
    assert "simworld.student" not in imported


def group_request(world: World, task: Task, grades: list[bool] | None) -> tuple[str, list[bool]]:
    answers = [student.reply(world, [{"role": "user", "content": task.question}], seed) for seed in range(5)]
    right = [answer.endswith(f"Answer: {task.answer}") for answer in answers]
    shown = grades if grades is not None else right
    attempts = "\n\n".join(
        f"Attempt {i} ({'correct' if good else 'wrong'}):\n{answer}"
        for i, (answer, good) in enumerate(zip(answers, shown, strict=True), 1)
    )
    text = f'Problem: {task.question}\n\n{attempts}\n\nAnswer with {{"operations": [...]}}, at most two operations.'
    return text, right


def operations(reply: str) -> list[dict[str, str]]:
    return json.loads(reply.split("```json")[1].split("```")[0])["operations"]


def test_contrasts_teach_true_rules_and_shuffled_grades_do_not() -> None:
    clean = teacher.Faults(wrong=0, harmful=0, duplicate=0, overfitted=0)
    true_share = {}
    for shuffled in (False, True):
        hits = total = 0
        for seed in range(6):
            world = World.make(seed)
            for index, task in enumerate(world.tasks("train", 40)):
                text, right = group_request(world, task, None)
                if not 0 < sum(right) < 5:
                    continue
                if shuffled:
                    grades = list(right)
                    random.Random(index).shuffle(grades)
                    text, _ = group_request(world, task, grades)
                for operation in operations(teacher.reply([{"role": "user", "content": text}], 0, clean)):
                    (statement,) = read_statements(operation["text"])
                    hits += statement.effect == world.rules.get(statement.words[0], Effect("none"))
                    total += 1
        true_share[shuffled] = hits / total
    assert true_share[False] > 0.6
    assert true_share[True] < true_share[False] - 0.2


def test_faults_have_the_shares_that_were_asked_for() -> None:
    faults = teacher.Faults(wrong=0, harmful=1, duplicate=0, overfitted=0)
    world = World.make(0)
    text = next(
        text for text, right in (group_request(world, t, None) for t in world.tasks("train", 40)) if 0 < sum(right) < 5
    )
    for operation in operations(teacher.reply([{"role": "user", "content": text}], 0, faults)):
        (statement,) = read_statements(operation["text"])
        assert statement.words == ()
    broken = teacher.reply([{"role": "user", "content": text}], 0, teacher.Faults(malformed=1))
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)


def test_a_summary_keeps_the_working_and_names_the_experiences_used() -> None:
    world = World.make(2)
    task = world.tasks("train", 1)[0]
    word = task.needs[0]
    library = f"[7] On {word}: When {word} is mentioned, {'leave the amount unchanged'}.\n[8] Tip: Check twice."
    attempt = "Start: 2 x 3 = 6.\n" + f"{word}: add 4, making 10.\nAnswer: 10"
    text = f"[8] On {word}: With {word}, put 4 on top.\n{task.question}\nAttempt (wrong):\n{attempt}\nSummarise it."
    summary = teacher.reply([{"role": "user", "content": text}], 0)
    assert find_attempts(summary)[0].answer == 10
    assert summary.endswith("Used: 8")
    assert teacher.reply([{"role": "user", "content": library + text.split("\n", 1)[1]}], 0).endswith("Used: none")


def test_the_world_is_the_one_that_was_frozen_before_the_optimiser_was_tuned() -> None:
    digest = hashlib.sha256()
    for path in sorted(Path(teacher.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    assert digest.hexdigest() == "91b78ea1eca8e508849102f5c7782680278ed617b8b99022ed6374cfd3e4607a"
