"""What is checked before the first call is paid for, and what a run will need at most."""

from __future__ import annotations

from typing import Any

from gym_sdk.errors import DataError, SpecError, Where
from gym_sdk.spec.training_free import CapsSpec, EndpointSpec, TrainingFreeGrpo
from gym_trainer.experience.budget import Usage, bound_prompt_tokens, cost_usd
from gym_trainer.experience.client import is_loopback
from gym_trainer.experience.questions import Question, Splits
from gym_trainer.rewards import Reward


def check_references(reward: Reward, splits: Splits, method: TrainingFreeGrpo) -> None:
    """Every reference can be compared with. Raises DataError for the first that cannot."""
    graded = (*splits.gate, *splits.test, *(splits.train if method.ground_truth == "answers" else ()))
    for question in graded:
        complaint = reward.check(question.reference or "")
        if complaint is not None:
            raise DataError(
                f"{complaint}, which the {method.reward.kind} reward needs",
                where=question.where,
                hint="choose another method.reward, or mend the row",
            )


def check_before_paying(method: TrainingFreeGrpo, splits: Splits) -> None:
    """Prices are known where a cost cap needs them, and each budget covers the least that it must. Raises SpecError."""
    teacher = method.teacher or method.student
    for purpose in ("training", "evaluation"):
        caps: CapsSpec = getattr(method.budget, purpose)
        for role, endpoint in (("student", method.student), ("teacher", teacher)):
            if caps.cost_usd is not None and endpoint.price is None and not is_loopback(endpoint.base_url):
                raise SpecError(
                    f"a cap on cost needs the prices of the {role} endpoint",
                    where=Where(path=f"method.budget.{purpose}.cost_usd"),
                    hint=f"set method.{role if method.teacher else 'student'}.price",
                )
    batch = sorted(splits.train, key=lambda question: len(question.text))[: method.batch_size]
    _check_covers(
        method.budget.training,
        "training",
        "one batch of attempts",
        method.student,
        [question for question in batch for _ in range(method.group_size)],
        method.rollout.max_tokens,
    )
    _check_covers(
        method.budget.evaluation,
        "evaluation",
        "the test questions once",
        method.student,
        [question for question in splits.test for _ in range(method.report.samples)],
        method.evaluation.max_tokens,
    )


def _check_covers(
    caps: CapsSpec,
    purpose: str,
    what: str,
    endpoint: EndpointSpec,
    questions: list[Question],
    max_tokens: int,
) -> None:
    """The budget covers calls for `questions` whose answers have one token each, and one call of full length."""
    if not questions:
        return
    least = Usage(
        prompt_tokens=sum(len(question.text.encode()) // 4 for question in questions),
        completion_tokens=len(questions),
    )
    one = Usage(
        prompt_tokens=bound_prompt_tokens(list(questions[0].messages)),
        completion_tokens=max_tokens,
    )
    needed = {
        "calls": float(len(questions)),
        "tokens": float(max(least.total, one.total)),
        "cost_usd": max(cost_usd(endpoint.price, least), cost_usd(endpoint.price, one)),
    }
    for name, amount in needed.items():
        cap = getattr(caps, name)
        if cap is not None and cap < amount:
            shown = f"{amount:.4f}" if name == "cost_usd" else f"{amount:.0f}"
            raise SpecError(
                f"is {cap:g}, and {what} needs at least {shown}",
                where=Where(path=f"method.budget.{purpose}.{name}"),
                hint="raise it, or lower method.batch_size, method.group_size or the answers' max_tokens",
            )


def plan_calls(method: TrainingFreeGrpo, splits: Splits) -> dict[str, Any]:
    """The most calls that a run can need, by what they are for. Retries are not counted."""
    batches = -(-len(splits.train) // method.batch_size) * method.epochs
    questions = len(splits.train) * method.epochs
    attempts = questions * method.group_size
    summaries = attempts if method.summaries != "never" else 0
    trials = 0
    gate = 0
    pruning = 0
    items = max(1, method.library.max_tokens // 12)
    if method.gate.has_trial:
        trials = questions * method.lessons_per_question * method.gate.trial_attempts
    if method.gate.has_test:
        gate = 2 * (batches + method.pruning.enabled) * len(splits.gate) * method.gate.samples
    if method.pruning.enabled:
        pruning = (items + 1) * min(method.pruning.questions, len(splits.train))
    test = len(splits.test) * method.report.samples
    arms = 2 + len(method.report.baselines) if test else 0
    training = {
        "attempts": attempts,
        "summaries": summaries,
        "critiques": 2 * questions,
        "consolidations": 2 * batches,
        "trials": trials,
        "gate": gate,
        "pruning": pruning,
    }
    return {
        "method": method.kind,
        "training_calls_at_most": {**training, "total": sum(training.values())},
        "evaluation_calls": {"test": test * arms, "tips": 2 if "tips" in method.report.baselines else 0},
        "budget": method.budget.model_dump(),
    }
