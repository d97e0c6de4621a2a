"""Knowledge distillation: the student's distribution drawn to the teacher's at every trained token.

Shapes: K trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gym_sdk.errors import ModelError, UserError, Where
from gym_sdk.spec import Distillation, RunSpec
from gym_serve.models import ResolvedModel, load_model, read_config
from gym_trainer.fast.attention import attention_of, check_isolation
from gym_trainer.fast.divergence import compare
from gym_trainer.fast.loss import default_chunk_size
from gym_trainer.loop.batch import IGNORED, MicroBatch, RowSource, StepBatch
from gym_trainer.loop.forward import ForwardModel, unwrap
from gym_trainer.objectives.base import LossSum, Objective, Ratio, Start, Unit
from gym_trainer.objectives.on_policy import with_own_answers
from gym_trainer.planning.workload import frozen_bytes


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model on disk, with the vocabulary that it must share."""

    resolved: ResolvedModel
    quantization: Literal["none", "nf4", "int8"]
    trust_remote_code: bool

    def resident_bytes(self, dtype: str) -> int:
        """Of its weights as they will be held."""
        config = read_config(self.resolved.folder, trust_remote_code=self.trust_remote_code)
        return frozen_bytes(config, getattr(torch, dtype), self.quantization)

    def load(self, start: Start) -> Any:
        """The frozen model, with an attention that keeps packed documents apart."""
        settings = start.settings
        model = load_model(
            self.resolved,
            dtype=settings.dtype,
            device=settings.device,
            quantization=self.quantization,
            trust_remote_code=self.trust_remote_code,
        )
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if start.runner.layout != "padded":
            start.stack.enter_context(attention_of(model, settings.attention))
            check_isolation(model)
        return model


class DistillationObjective(Objective):
    """The divergence over trained tokens, and the rows' own cross-entropy with `sft_weight`."""

    unit: ClassVar[Unit] = "token"

    def __init__(
        self, method: Distillation, teacher: Teacher, *, stop_ids: tuple[int, ...] = (), seed: int = 0
    ) -> None:
        """`stop_ids` end the answers that the student writes."""
        self.method = method
        self.teacher = teacher
        self.stop_ids = stop_ids
        self.seed = seed
        self._teacher: ForwardModel | None = None

    def start(self, start: Start, rows: Sequence[RowSource]) -> list[RowSource]:
        start.events.log("info", f"loading the teacher {self.teacher.resolved.source}")
        self._teacher = ForwardModel(self.teacher.load(start), loss_chunk_size=start.settings.loss_chunk_size)
        return list(rows)

    def resident_bytes(self, dtype: str) -> int:
        return self.teacher.resident_bytes(dtype)

    def prepared_step(self, model: ForwardModel, step: StepBatch) -> StepBatch:
        if not self.method.on_policy_share:
            return step
        return with_own_answers(
            unwrap(model.wrapped),
            step,
            share=self.method.on_policy_share,
            max_tokens=self.method.on_policy_max_tokens,
            stop_ids=self.stop_ids,
            seed=self.seed,
        )

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        assert self._teacher is not None
        method = self.method
        with torch.no_grad():
            teacher, _ = self._teacher.labelled_logits(micro_batch)
        student, labels_K = model.labelled_logits(micro_batch)
        imitated_K = _imitated(micro_batch)
        compared = compare(
            student,
            teacher,
            labels_K,
            imitated_K=imitated_K,
            kind=method.divergence,
            beta=method.beta,
            temperature=method.temperature,
            chunk_size=model.loss_chunk_size or self._chunk_size(model),
        )
        num_imitated = imitated_K.sum()
        metrics = {
            "divergence": Ratio(compared.divergence_sum.detach(), torch.tensor(float(len(labels_K)))),
            "nll": Ratio(compared.cross_entropy_sum.detach(), num_imitated),
            "token_accuracy": Ratio(compared.num_correct, num_imitated),
        }
        loss = compared.divergence_sum
        if method.sft_weight:
            loss = loss + method.sft_weight * compared.cross_entropy_sum
        return LossSum(loss, metrics)

    @staticmethod
    def _chunk_size(model: ForwardModel) -> int:
        """Both models' logits and their difference are there at once."""
        return 128 if model.head is None else max(64, default_chunk_size(model.head.weight_VD) // 4)


def _imitated(batch: MicroBatch) -> Tensor:
    """Which labelled positions are of an example, and not of an answer that the student wrote: bool [K]."""
    examples = [not row.written_by_model for row in batch.rows for _ in row.documents]
    examples_N = torch.tensor(examples, device=batch.document_ids_T.device)
    positions_K = torch.nonzero(batch.labels_T != IGNORED).squeeze(1).to(batch.document_ids_T.device)
    return examples_N[batch.document_ids_T[positions_K]]


def resolve_teacher(spec: RunSpec, student_folder: Path) -> Teacher:
    """The teacher of a specification, downloaded where it must be, its vocabulary compared before any weight is read.

    Raises:
        ModelError: there is no such model.
        UserError: its tokens are not the student's.
    """
    from gym_data import Tokenizer
    from gym_serve.models import resolve

    method = spec.method
    assert isinstance(method, Distillation)
    try:
        resolved = resolve(method.teacher)
    except ModelError as error:
        raise ModelError(f"method.teacher: {error.message}", where=error.where, hint=error.hint) from None
    own, other = (Tokenizer.from_folder(folder).backend.get_vocab() for folder in (student_folder, resolved.folder))
    if own != other:
        different = {token for token in own.keys() | other.keys() if own.get(token) != other.get(token)}
        raise UserError(
            f"the teacher has another vocabulary than the student: {len(different)} tokens differ, such as "
            f"{min(different)!r}",
            where=Where(path="method.teacher"),
            hint="distillation compares distributions over the same tokens: choose a teacher of the same family, or "
            "train on answers that the teacher wrote (method: {kind: sft})",
        )
    return Teacher(
        resolved=resolved,
        quantization=method.teacher_quantization,
        trust_remote_code=spec.model.trust_remote_code,
    )
