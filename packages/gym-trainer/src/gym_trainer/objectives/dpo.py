"""Direct preference optimisation and the losses that share its form.

Shapes: T positions of a micro-batch, N its documents, P its pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gym_sdk.spec import Dpo
from gym_trainer.loop.batch import MicroBatch, RowSource
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import LossSum, Ratio, Start
from gym_trainer.objectives.logprobs import Pairs, answer_lengths, answer_sums, excess_weights
from gym_trainer.objectives.preference import (
    PairObjective,
    hinge,
    pair_metrics,
    robust_logistic,
    smoothed_logistic,
    squared_to_target,
)
from gym_trainer.objectives.reference import Reference


class DpoObjective(PairObjective):
    """The margin of the implicit rewards beta log(p / p_ref), under one loss or a weighted sum of several."""

    def __init__(self, method: Dpo, reference: Reference) -> None:
        self.method = method
        self.reference = reference
        self.losses: list[tuple[str, float]] = [
            (method.loss, method.loss_weight),
            *((e.name, e.weight) for e in method.extra_losses),
        ]

    def start(self, start: Start, rows: Sequence[RowSource]) -> list[RowSource]:
        return self.reference.start(start, rows, self._logprobs)

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        reference = Pairs.of(self.reference.logprobs(model, micro_batch, self._logprobs))
        policy_N, plain_N = self._logprobs_and_plain(model, micro_batch)
        policy, plain = Pairs.of(policy_N), Pairs.of(plain_N)
        lengths = Pairs.of(answer_lengths(micro_batch))
        log_ratios = policy - reference
        metrics = pair_metrics(log_ratios.times(self.method.beta), policy)
        total_P = log_ratios.chosen_P.new_zeros(())
        for name, weight in self.losses:
            losses_P = self._pair_losses(name, log_ratios, plain, lengths)
            total_P = total_P + weight * losses_P
            if len(self.losses) > 1:
                metrics[f"loss/{name}"] = Ratio.mean(losses_P)
        return LossSum(total_P.sum(), metrics)

    def _pair_losses(self, name: str, log_ratios: Pairs, plain: Pairs, lengths: Pairs) -> Tensor:
        beta, smoothing = self.method.beta, self.method.label_smoothing
        rewards = log_ratios.times(beta)
        match name:
            case "sigmoid":
                return smoothed_logistic(rewards.difference(), smoothing)
            case "robust":
                return robust_logistic(rewards.difference(), smoothing)
            case "hinge":
                return hinge(rewards.difference())
            case "ipo":
                return squared_to_target((log_ratios / lengths).difference(), beta)
            case "apo_zero":
                # arXiv 2408.06266, equation 7: chosen up, rejected down
                return 1 - rewards.chosen_P.sigmoid() + rewards.rejected_P.sigmoid()
            case "apo_down":
                # equation 8: chosen down, rejected further down
                return rewards.chosen_P.sigmoid() + 1 - rewards.difference().sigmoid()
            case "sft":
                return -(plain.chosen_P / lengths.chosen_P)
            case _:
                raise AssertionError(f"no DPO loss {name}")

    def _logprobs(self, model: ForwardModel, batch: MicroBatch) -> Tensor:
        return self._logprobs_and_plain(model, batch)[0]

    def _logprobs_and_plain(self, model: ForwardModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The answers' log-probabilities [N]: as the preference sees them, and plain."""
        logprobs_T = model.logprobs(batch)
        plain_N = answer_sums(logprobs_T, batch)
        if self.method.length_alpha == 1:
            return plain_N, plain_N
        weights_T = excess_weights(batch, answer_lengths(batch), self.method.length_alpha)
        return answer_sums(logprobs_T * weights_T, batch), plain_N
