"""`method: {kind: training_free_grpo}` improve a model through its context (arXiv 2510.08191)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from gym_sdk.spec._base import FilePath, SpecModel
from gym_sdk.spec.rewards import MathReward, RewardSpec

if TYPE_CHECKING:
    from gym_sdk.spec.run import RunSpec


class PriceSpec(SpecModel):
    """What an endpoint charges, in US dollars for a million tokens."""

    input_usd_per_million: Annotated[float, Field(ge=0)]
    """Tokens of the prompt."""

    output_usd_per_million: Annotated[float, Field(ge=0)]
    """Tokens of the answer, reasoning included."""

    cached_input_usd_per_million: Annotated[float, Field(ge=0)] | None = None
    """Prompt tokens that the endpoint had cached; as other prompt tokens when not given."""


class EndpointSpec(SpecModel):
    """An OpenAI-compatible chat endpoint."""

    base_url: Annotated[str, Field(pattern=r"^https?://\S+$")] = "http://127.0.0.1:8000/v1"
    """Up to and including the version: `/chat/completions` is added. The default is `gym serve` on this machine."""

    model: str | None = None
    """The name that the endpoint knows the model by; `model.source` when not given. One of the two is needed."""

    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """The environment variable that holds the key. Keys are never written into a specification. Without it,
    GYM_API_KEY, or else the key of this machine's own daemon, is sent to a loopback address, and nothing elsewhere."""

    price: PriceSpec | None = None
    """What calls cost; nothing on a loopback address when not given. A cost cap needs it elsewhere."""

    max_concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Calls under way at a time."""

    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    """The endpoint's limit; kept to, so that 429 stays rare."""

    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """The endpoint's limit of prompt and answer tokens together."""

    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """The longest wait for an answer to begin: `max_concurrency` calls share a slow endpoint. An answer without an end
    by `timeout_s + max_tokens * timeout_per_token_s` counts as lost, and is asked for once more."""

    timeout_per_token_s: Annotated[float, Field(ge=0)] = 0.1
    """Further time for each token of the longest answer: by default ten tokens a second for each call under way."""

    max_attempts: Annotated[int, Field(ge=1, le=20)] = 6
    """Tries of a call that meets a busy or failing endpoint; the wait between them doubles from one second."""

    send_seed: bool = True
    """Send a seed with each call. Off for endpoints that refuse the field."""

    extra_body: dict[str, bool | int | float | str] = {}
    """Further fields of each request, such as `reasoning_effort`."""


class SamplingSpec(SpecModel):
    """How answers are drawn."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    """0 always takes the likeliest token."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of probability that is drawn from; all of it when not given."""

    max_tokens: Annotated[int, Field(ge=1)] = 16_384
    """The longest answer."""


class EvaluationSamplingSpec(SamplingSpec):
    """How answers are drawn where accuracy is measured."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.3
    """0 always takes the likeliest token."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = 0.95
    """The share of probability that is drawn from."""


class UpdaterSamplingSpec(SamplingSpec):
    """How the teacher writes."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 always takes the likeliest token."""

    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """The longest answer."""


PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def _prompt(*needed: str, may: tuple[str, ...] = ()) -> AfterValidator:
    """A wording that has all of `needed` as `{name}`, and nothing in braces that nothing fills in."""

    def check(text: str) -> str:
        found = set(PLACEHOLDER.findall(text))
        if missing := [name for name in needed if name not in found]:
            raise ValueError(f"must have {{{missing[0]}}} where that is to stand")
        if unknown := sorted(found - {*needed, *may}):
            known = ", ".join(f"{{{name}}}" for name in (*needed, *may))
            raise ValueError(f"nothing fills in {{{unknown[0]}}}; there are {known}")
        return text

    return AfterValidator(check)


class PromptsSpec(SpecModel):
    """Other wordings of what the teacher is asked. Gym's own follow the steps of the paper
    (`gym_trainer/experience/prompts.py`). How operations are to be written is added by itself, because it is read."""

    summary: Annotated[
        Annotated[str, _prompt("question", "attempt", may=("experiences", "grade"))] | None,
        Field(examples=["Summarise this. {question} {grade}{attempt}"]),
    ] = None
    """Of one attempt, with `{question}` and `{attempt}`, and if wanted `{experiences}` and `{grade}`. A last line
    `Used: 1, 3` of the answer names the experiences that were followed, for their counts."""

    critique: Annotated[
        Annotated[
            str,
            _prompt("experiences", "question", "attempts", may=("reference", "task", "max_operations", "max_words")),
        ]
        | None,
        Field(examples=["{experiences} {question} {reference}{attempts} {task} Write {max_operations}."]),
    ] = None
    """Of a group, with `{experiences}`, `{question}` and `{attempts}`, and if wanted `{reference}` (the right answer,
    where one is known), `{task}` (compare, or judge where no grade is known), `{max_operations}` and `{max_words}`."""

    consolidation: Annotated[
        Annotated[str, _prompt("experiences", "proposals", may=("max_words",))] | None,
        Field(examples=["Merge these into the list. {experiences} {proposals}"]),
    ] = None
    """Of a batch, with `{experiences}` and `{proposals}`, and if wanted `{max_words}`."""


class LibrarySpec(SpecModel):
    """The experience library and its limits."""

    initial: Annotated[str, FilePath()] | None = None
    """A library to start from: a file, or a run's `experience` folder. Empty when not given."""

    placement: Literal["system", "user"] = "system"
    """Where it stands in the prompt: at the end of the `system` message, which endpoints can cache, or after the
    question in the `user` message, as published."""

    max_tokens: Annotated[int, Field(ge=16)] = 2000
    """The most tokens, at four bytes each; the least helpful items leave first."""

    max_item_words: Annotated[int, Field(ge=4, le=400)] = 32
    """The longest item."""

    drop_duplicates: bool = True
    """Leave out an item that says what another one says, in nearly the same words."""

    drop_leaks: bool = True
    """Leave out an item that repeats a training question's answer instead of a lesson."""


class GateSpec(SpecModel):
    """Which changes of the library are accepted: a trial of each operation, then a test on held-out questions."""

    enabled: bool = True
    """Off, every change is accepted, as published."""

    held_out: bool = True
    """The second stage, the test on held-out questions. Off, the trial alone decides: cheaper, and without the bound on
    accepting a change that harms."""

    trial_attempts: Annotated[int, Field(ge=0, le=64)] = 4
    """The first stage: fresh attempts, with one operation applied, at the questions that it was drawn from. Their mean
    reward must not be below that of the attempts before. 0 leaves the stage out."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """The share of the training questions that is held out for the gate."""

    min_questions: Annotated[int, Field(ge=8)] = 30
    """The fewest questions that a gate may have: fewer cannot tell a gain from luck."""

    delta: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The loss of accuracy that is put up with: the lower bound of the difference must be above -delta. At 0, a change
    must prove a gain."""

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided, for all tests of a run together."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Answers a question and library; their mean is compared."""

    patience: Annotated[int, Field(ge=0)] = 3
    """For how many batches operations that lack evidence stay in the working library, and so add up, before they are
    dropped."""

    @property
    def has_trial(self) -> bool:
        """Whether the first stage takes place."""
        return self.enabled and self.trial_attempts > 0

    @property
    def has_test(self) -> bool:
        """Whether the second stage takes place."""
        return self.enabled and self.held_out


class PruningSpec(SpecModel):
    """Taking items out that do harm."""

    enabled: bool = False
    """Leave each item out in turn, at the end of the run, and let the gate decide on the library without those that
    did harm. Off, because it costs `questions` calls an item, and the gate has let few harmful ones in; worth it for
    a library that was written or merged by hand."""

    questions: Annotated[int, Field(ge=1)] = 30
    """The training questions that each item is measured on."""


class CapsSpec(SpecModel):
    """Hard limits; a call that could pass one is not made."""

    cost_usd: Annotated[float, Field(gt=0)] | None = None
    """US dollars, at the price table in use."""

    tokens: Annotated[int, Field(gt=0)] | None = None
    """Prompt and answer tokens together."""

    calls: Annotated[int, Field(gt=0)] | None = None
    """Requests, retries included."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time in which calls are made."""


class BudgetSpec(SpecModel):
    """What may be spent."""

    training: CapsSpec = CapsSpec()
    """Rollouts, lessons, trials, gate and pruning."""

    evaluation: CapsSpec = CapsSpec()
    """Accuracy before and after, baselines, and each item's worth."""


class ExperienceReportSpec(SpecModel):
    """What is measured on the final test questions (`data.eval`), which nothing in the loop sees."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Answers a question; the published figures take the mean of 32."""

    baselines: list[Literal["placebo", "tips"]] = ["placebo", "tips"]
    """Beside no library at all: `placebo`, general advice of the same length; `tips`, lessons of the same length that
    the teacher writes from questions and answers without any attempt."""

    worth_questions: Annotated[int, Field(ge=0)] = 50
    """The test questions on which each item of the final library is left out once; 0 leaves this out."""


class TrainingFreeGrpo(SpecModel):
    """Grouped attempts, verified rewards, and written lessons from the contrast inside each group; no gradient."""

    kind: Literal["training_free_grpo"] = "training_free_grpo"
    """Training-free GRPO."""

    preset: Literal["gated", "paper"] = "gated"
    """The defaults of all other fields: `gated` tests every change; `paper` is the published behaviour: no gate, no
    limits but the item's length, a summary of every attempt, the library after the question."""

    student: EndpointSpec = EndpointSpec()
    """The model that is improved."""

    teacher: EndpointSpec | None = None
    """The model that writes the lessons; the student when not given, as published."""

    instruction: str | None = None
    """A system message for every question, such as where to put the answer."""

    reward: RewardSpec = MathReward()
    """How answers are verified."""

    ground_truth: Literal["answers", "majority", "critique"] = "answers"
    """What rewards rest on: the rows' `answers`; without them, agreement with the `majority` of a group (the gate is
    its trial alone then), or no grade at all, so that the teacher judges by itself (`critique`; without a gate)."""

    question_field: str | None = None
    """The field of a row that holds the question, where the row is in no known format."""

    answer_field: str | None = None
    """The field of a row that holds the reference answer, beside `question_field`."""

    epochs: Annotated[int, Field(ge=1)] = 3
    """Passes over the training questions."""

    batch_size: Annotated[int, Field(ge=1)] = 50
    """Questions whose lessons change the library together."""

    group_size: Annotated[int, Field(ge=1)] = 5
    """Attempts at each question. A group of one has no contrast: all groups are kept then."""

    lessons_per_question: Annotated[int, Field(ge=1, le=10)] = 1
    """The most operations that one group may propose."""

    rollout: SamplingSpec = SamplingSpec()
    """How attempts are drawn in training."""

    evaluation: EvaluationSamplingSpec = EvaluationSamplingSpec()
    """How answers are drawn on gate and test questions."""

    updater: UpdaterSamplingSpec = UpdaterSamplingSpec()
    """How the teacher writes."""

    summaries: Literal["auto", "always", "never"] = "auto"
    """Whether the teacher first summarises each attempt: `auto` for attempts of over 2,000 characters."""

    prompts: PromptsSpec = PromptsSpec()
    """What the teacher is asked."""

    library: LibrarySpec = LibrarySpec()
    """The library and its limits."""

    gate: GateSpec = GateSpec()
    """Which changes are accepted."""

    pruning: PruningSpec = PruningSpec()
    """Which items leave again."""

    budget: BudgetSpec = BudgetSpec()
    """What may be spent."""

    report: ExperienceReportSpec = ExperienceReportSpec()
    """What is measured at the end."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        """What the user does not give comes from the preset, so that the saved specification holds every value."""
        if not isinstance(data, Mapping) or data.get("preset") != "paper":
            return data
        filled: dict[str, Any] = {"summaries": "always", "batch_size": 100, **data}
        for section, defaults in _PAPER_SECTIONS.items():
            given = data.get(section, {})
            filled[section] = {**defaults, **given} if isinstance(given, Mapping) else given
        return filled


_PAPER_SECTIONS: dict[str, dict[str, Any]] = {
    "library": {"placement": "user", "max_tokens": 1_000_000, "drop_duplicates": False, "drop_leaks": False},
    "gate": {"enabled": False},
}


def student_model_of(data: Mapping[str, Any]) -> str | None:
    """`method.student.model` of a specification that is not validated yet; None where it is no run of this method."""
    method = data.get("method")
    if not isinstance(method, Mapping) or method.get("kind") != "training_free_grpo":
        return None
    student = method.get("student")
    name = student.get("model") if isinstance(student, Mapping) else None
    return name if isinstance(name, str) and name else None


def find_training_free_conflicts(spec: RunSpec) -> list[tuple[str, str]]:
    """Settings that have no effect on a run without weights, or that contradict each other."""
    from gym_sdk.spec.adapter import LoraAdapter
    from gym_sdk.spec.evaluation import EvaluationSpec
    from gym_sdk.spec.train import TrainSpec

    method = spec.method
    if not isinstance(method, TrainingFreeGrpo):
        return []
    found: list[tuple[str, str]] = []
    if spec.adapter != LoraAdapter():
        found.append(("adapter", "training_free_grpo trains no weights; its result is an experience library"))
    if spec.train != TrainSpec():
        found.append(("train", "training_free_grpo takes no optimizer steps; set method.epochs and method.batch_size"))
    if spec.evaluation != EvaluationSpec():
        found.append(("evaluation", "training_free_grpo measures by method.reward on the rows of data.eval"))
    if spec.output.merge:
        found.append(("output.merge", "training_free_grpo has no adapter to merge"))
    if spec.model.quantization != "none":
        found.append(("model.quantization", "training_free_grpo loads no weights; the endpoint chooses"))
    if method.answer_field is not None and method.question_field is None:
        found.append(("method.answer_field", "needs method.question_field"))
    if method.ground_truth == "critique" and method.gate.enabled:
        found.append(("method.gate.enabled", "without grades there is nothing to test; set it to false"))
    if method.ground_truth == "majority" and method.gate.has_test:
        found.append(
            (
                "method.gate.held_out",
                "agreement with a majority is no measure of a gain elsewhere; set it to false",
            )
        )
    if method.gate.enabled and not method.gate.has_trial and not method.gate.has_test:
        found.append(("method.gate.enabled", "neither of its stages is on; set it to false"))
    if method.pruning.enabled and not method.gate.has_test:
        found.append(("method.pruning.enabled", "a pruned library has to pass the held-out test, which is off"))
    if method.ground_truth == "majority" and method.reward.kind in ("regex", "python", "plugin"):
        found.append(
            ("method.ground_truth", f"a majority needs answers that can be compared, which {method.reward.kind} is not")
        )
    return found
