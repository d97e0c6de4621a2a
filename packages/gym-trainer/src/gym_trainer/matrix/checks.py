"""What Gym does with a model, done with a tiny one: each step passes, or says why not.

Everything goes through the code that a run uses (`attach`, `fit`, `save_adapter`, `merge_adapter`, `load_model`), so a
row of the matrix is a statement about Gym, not about transformers.
"""

from __future__ import annotations

import importlib.util
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from gym_sdk.errors import GymError
from gym_sdk.events import EventWriter, MetricEvent, read_events
from gym_sdk.spec import RunSpec, spec_from_data
from gym_serve.models import load_adapter, load_model, resolve
from gym_serve.models.direct_weights import experts_are_read
from gym_trainer.adapters import attach, expert_weights
from gym_trainer.exporting.adapter import save_adapter, trained_weights
from gym_trainer.exporting.folder import Base
from gym_trainer.exporting.merge import SharedWeights, merge_adapter
from gym_trainer.exporting.probe import probe_ids, probe_logits, relative_distance
from gym_trainer.fast import attention
from gym_trainer.loop.fit import FitSettings, fit
from gym_trainer.matrix.architectures import Architecture
from gym_trainer.matrix.gradients import bypassed, layers_that_learn, watch
from gym_trainer.matrix.rows import RandomRows
from gym_trainer.matrix.tiny import write_tiny_model
from gym_trainer.objectives.sft import SftObjective

Status = Literal["pass", "unpacked", "refused", "not applicable", "fail"]

CHECKS = ("load", "packing", "lora", "experts", "reload", "merge", "full", "qlora")
"""In the order in which they run."""

NUM_LORA_UPDATES = 5
_TOLERANCE = 1e-4
"""Relative distance of logits in float32 that is rounding and nothing else."""
_LORA = {"kind": "lora", "rank": 4}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one check ended. `unpacked`: documents cannot be kept apart, and Gym trains one a row, which was tried.
    `refused`: the architecture cannot have it, and Gym says so instead of a wrong result."""

    status: Status
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One architecture."""

    model_type: str
    class_name: str
    group: str
    aliases: tuple[str, ...]
    num_expert_weights: int = 0
    """Weights that hold experts; 0 for a dense model."""
    checks: dict[str, Outcome] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything that applies passed."""
        return set(self.checks) == set(CHECKS) and all(o.status != "fail" for o in self.checks.values())


class Failed(Exception):
    """A check that did not hold; the message says how."""


def check_architecture(architecture: Architecture, only: Sequence[str] = CHECKS) -> Row:
    """Every check, each with its own verdict. One that needs what an earlier one made fails with it."""
    with tempfile.TemporaryDirectory(prefix="gym-matrix-") as scratch:
        bench = _Bench(architecture, Path(scratch))
        checks = {name: _outcome(getattr(bench, name)) for name in CHECKS if name in only}
    return Row(
        model_type=architecture.model_type,
        class_name=architecture.class_name,
        group=architecture.group,
        aliases=architecture.aliases,
        num_expert_weights=bench.num_expert_weights,
        checks=checks,
    )


def _outcome(check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Failed as error:
        return Outcome(status="fail", note=str(error))
    except GymError as error:
        return Outcome(status="fail", note=error.message)
    except Exception as error:  # noqa: BLE001 - whatever a model does, its row says it and the others go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip().splitlines() or [""])[0]
        return Outcome(status="fail", note=f"{type(error).__name__} in {Path(where.filename).name}: {first}"[:300])


class _Bench:
    """One architecture on the bench, with what its checks hand on."""

    def __init__(self, architecture: Architecture, scratch: Path) -> None:
        self.architecture = architecture
        self.scratch = scratch
        self.num_expert_weights = 0
        self.attention: str | None = None
        self.rows = RandomRows()
        self._base: Base | None = None
        self._trained: Any = None
        self._trained_logits: torch.Tensor | None = None
        self._expert_gradients: dict[str, torch.Tensor] = {}

    @property
    def base(self) -> Base:
        if self._base is None:
            raise Failed("there is no model")
        return self._base

    def load(self) -> Outcome:
        """A folder of the model, loaded as a run loads it."""
        folder = write_tiny_model(self.architecture, self.scratch / "base")
        self._base = Base.of(resolve(str(folder)))
        model = self._fresh()
        self.num_expert_weights = len(expert_weights(model))
        again = probe_logits(self._fresh(), probe_ids(self.base))
        _require_near("two loads", probe_logits(model, probe_ids(self.base)), again)
        return Outcome(status="pass")

    def packing(self) -> Outcome:
        """Each document's logits packed with others, and padded, are those that it has alone."""
        model = self._fresh()
        alone = [_logits(model, ids[None])[0] for ids in self.rows.tensors()]
        try:
            name = attention.choose(model.config, "cpu", torch.float32)
            with attention.attention_of(model, name):
                attention.check_isolation(model)
                packed = self.rows.packed_logits(model)
        except attention.LeakingAttention as error:
            if attention.is_moved_by_padding(model):
                return Outcome(status="unpacked", note=f"{error.message}; nor padded: each row alone")
            for one, other in zip(alone, self.rows.padded_logits(model), strict=True):
                _require_near("alone and padded", one, other)
            return Outcome(status="unpacked", note=error.message)
        for one, other in zip(alone, packed, strict=True):
            _require_near("alone and packed", one, other)
        self.attention = name
        return Outcome(status="pass")

    def lora(self) -> Outcome:
        """Five updates of LoRA on all linear layers, and on the experts where there are any: every adapter learns."""
        model = self._fresh()
        adapts_experts = self.num_expert_weights and not experts_are_read(self.architecture.model_type)
        spec = self._spec(_LORA | ({"experts": "adapt"} if adapts_experts else {}), NUM_LORA_UPDATES + 1, 1e-2)
        trained = attach(model, spec.adapter, seed=0).model
        initial = trained_weights(trained)
        gradients = watch(trained, lambda name: ".lora_" in name)
        losses = self._fit(trained, spec, "lora")
        _require_lower(losses)
        unused = self._require_gradients(gradients)
        self._expert_gradients = {name: total for name, total in gradients.items() if "expert" in name}
        self._trained = trained.eval()
        self._trained_logits = probe_logits(trained, probe_ids(self.base))
        save_adapter(trained, self.scratch / "adapter", self.base, initial=initial, metadata={})
        note = f"; {len(unused)} layers, such as {unused[0]}, have no part in what it writes" if unused else ""
        return Outcome(status="pass", note=f"loss {losses[0]:.2f} to {losses[-1]:.2f}{note}")

    def experts(self) -> Outcome:
        """Every adapted expert weight got a gradient."""
        if not self.num_expert_weights:
            return Outcome(status="not applicable", note="dense")
        self._require_trained()
        if experts_are_read(self.architecture.model_type):
            return Outcome(status="refused", note="the model's code reads its experts' weights past peft's update")
        if not self._expert_gradients:
            raise Failed("no expert weight was adapted")
        if still := [name for name, total in self._expert_gradients.items() if not bool(total.any())]:
            raise Failed(f"{len(still)} expert weights got no gradient, such as {still[0]}")
        return Outcome(status="pass", note=f"{len(self._expert_gradients)} adapter weights of experts learn")

    def reload(self) -> Outcome:
        """The saved adapter on a fresh base says what training left."""
        expected = self._require_trained()
        loaded = load_adapter(self._fresh(), self.scratch / "adapter")
        _require_near("trained and reloaded", expected, probe_logits(loaded, probe_ids(self.base)))
        return Outcome(status="pass")

    def merge(self) -> Outcome:
        """The merged folder, loaded by plain transformers, says the same."""
        from transformers import AutoModelForCausalLM

        expected = self._require_trained()
        out = self.scratch / "merged"
        try:
            merge_adapter(self.base, self.scratch / "adapter", out, dtype="float32", metadata={})
        except SharedWeights as error:
            return Outcome(status="refused", note=error.message)
        merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        _require_near("trained and merged", expected, probe_logits(merged, probe_ids(self.base)))
        return Outcome(status="pass")

    def full(self) -> Outcome:
        """An update of every weight lowers the loss and changes them."""
        model = self._fresh()
        spec = self._spec({"kind": "full"}, 2, 1e-3)
        trained = attach(model, spec.adapter, seed=0).model
        initial = trained_weights(trained)
        fused = {name for name, weight in expert_weights(trained).items() if weight.ndim == 3}
        gradients = watch(trained, lambda name: name in fused)
        losses = self._fit(trained, spec, "full")
        _require_lower(losses)
        changed = sum(not torch.equal(p.detach(), initial[name]) for name, p in trained.named_parameters())
        if changed < 0.5 * len(initial):
            raise Failed(f"only {changed} of {len(initial)} weights changed")
        reached = {name: int((total.flatten(1).abs().sum(1) > 0).sum()) for name, total in gradients.items()}
        if still := [name for name, count in reached.items() if count == 0]:
            raise Failed(f"{len(still)} expert weights got no gradient, such as {still[0]}")
        experts = sum(len(total) for total in gradients.values())
        note = f"; gradients reach {sum(reached.values())} of {experts} experts" if experts else ""
        return Outcome(status="pass", note=f"{changed} of {len(initial)} weights changed{note}")

    def qlora(self) -> Outcome:
        """An update of LoRA on a base in nf4."""
        if importlib.util.find_spec("bitsandbytes") is None:
            return Outcome(status="not applicable", note="bitsandbytes is not installed")
        model = load_model(self.base.resolved, dtype="float32", quantization="nf4")
        spec = self._spec(_LORA, 2, 1e-2)
        losses = self._fit(attach(model, spec.adapter, seed=0).model, spec, "qlora")
        _require_lower(losses)
        return Outcome(status="pass")

    def _require_gradients(self, adapters: dict[str, torch.Tensor]) -> list[str]:
        """The adapted layers that the model does not compute. One that it does, with an adapter that gets no gradient,
        is a layer whose weight the model's own code reads (`gym_serve.models.direct_weights`)."""
        learns = layers_that_learn(adapters)
        still = sorted(layer for layer, any_gradient in learns.items() if not any_gradient)
        if still and (read := bypassed(learns, self._fresh(), self.rows.tensors())):
            raise Failed(
                f"adapters beside {len(read)} layers get no gradient, and the layers' own weights do, such as {read[0]}"
            )
        return still

    def _fresh(self) -> Any:
        return load_model(self.base.resolved, dtype="float32")

    def _require_trained(self) -> torch.Tensor:
        if self._trained_logits is None:
            raise Failed("there is no adapter")
        return self._trained_logits

    def _spec(self, adapter: dict[str, Any], num_steps: int, learning_rate: float) -> RunSpec:
        train = {"max_steps": num_steps, "learning_rate": learning_rate, "schedule": "constant", "warmup_ratio": 0.0}
        return spec_from_data(
            {
                "model": {"source": "tiny"},
                "data": {"train": [{"source": "rows.jsonl"}]},
                "adapter": adapter,
                "train": train | {"batch_size": len(self.rows)},
            }
        )

    def _fit(self, model: Any, spec: RunSpec, name: str) -> list[float]:
        """The loss before each update."""
        run_path = self.scratch / name
        (run_path / "checkpoints").mkdir(parents=True)
        settings = FitSettings(
            device="cpu",
            dtype=torch.float32,
            attention=self.attention or "sdpa",
            packed=self.attention is not None,
            micro_batch_tokens=48,
        )
        with EventWriter(run_path / "events.jsonl") as events:
            fit(
                model,
                spec,
                settings,
                SftObjective(),
                train_rows=self.rows,
                eval_rows=None,
                run_path=run_path,
                events=events,
            )
        found = read_events(run_path / "events.jsonl")
        return [event.values["loss"] for event in found if isinstance(event, MetricEvent) and "loss" in event.values]


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.double()


def _require_lower(losses: list[float]) -> None:
    if not losses[-1] < losses[0]:
        raise Failed(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")


def _require_near(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
    distance = relative_distance(one, other)
    if not distance <= _TOLERANCE:
        raise Failed(f"logits {what} are {distance:.1e} apart")
