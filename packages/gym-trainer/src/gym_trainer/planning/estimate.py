"""Memory and time of one micro-batch of a run, from simulations of a short model and a longer one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from gym_sdk.spec.adapter import AdapterSpec, FreezeAdapter, FullAdapter, LoraAdapter
from gym_trainer.adapters import attach
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.fused.apply import margin_bytes, padding_flops_per_token
from gym_trainer.fast.head import HeadNotLinear, parts
from gym_trainer.fast.layers import decoder_layers
from gym_trainer.fast.loss import linear_cross_entropy
from gym_trainer.planning.hardware import Hardware
from gym_trainer.planning.memory import LayerMemory, StaticMemory, optimizer_bytes, static_memory
from gym_trainer.planning.simulate import Simulator, Trace
from gym_trainer.planning.speed import Work, work_of
from gym_trainer.planning.workload import QUANTIZED_BYTES, MicroBatchShape, layer_pattern, meta_model, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from gym_sdk.spec import RunSpec


# Compiled layers against the simulated ones, Qwen3-8B, LoRA, 8,192 tokens, one H200, torch 2.11 (docs/performance.md):
# 1.07 GiB a layer kept instead of 1.46, 0.39 where recomputed inside the graph; 521 ms a step instead of 717; a layer's
# recomputation leaves out its last matrix product.
_COMPILED_KEPT = 0.73
_COMPILED_RECOMPUTED = 0.27
_COMPILED_TRAFFIC = 0.4
_COMPILED_RECOMPUTED_WORK = 0.74
_COMPILED_HOST = 0.15
_FUSED_HOST = 1.3
"""An operation of a fused layer takes the host this much longer: most are launches of Triton (docs/performance.md)."""
_CHECKPOINT_HOST = 2.5
"""An operation inside `torch.utils.checkpoint` takes the host this much longer: saved tensors pass through hooks."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchEstimate:
    """One micro-batch, forward and backward."""

    num_tokens: int
    memory: LayerMemory
    kept: Work
    """With every layer kept."""
    forward: Work
    """Of `kept`, the forward pass alone."""
    recomputation: Work = field(default_factory=Work)
    """What recomputing one layer adds."""
    num_layers: int

    def work(self, num_recomputed: int) -> Work:
        return self.kept + self.recomputation.times(num_recomputed)


@dataclass(frozen=True)
class _Key:
    """What a simulation depends on."""

    adapter: str
    config: str
    dtype: torch.dtype
    fast: FastPath
    document_tokens: int
    shared_tokens: int


class Simulations:
    """Simulated micro-batches of a short model and of one with a pattern more. Independent of the device."""

    def __init__(
        self,
        spec: RunSpec,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        fast: FastPath,
        document_tokens: int,
        shared_tokens: int = 0,
    ) -> None:
        """`shared_tokens`: of a document, those that its pair's other one has in common with it and that stand once."""
        self.fast = fast
        self.document_tokens = document_tokens
        self.shared_tokens = shared_tokens
        self.num_layers: int = config.get_text_config().num_hidden_layers
        pattern = layer_pattern(config)
        self.lengths: tuple[int, int] = (pattern, min(2 * pattern, self.num_layers))
        short, long = self.lengths
        self.num_extra: float = (self.num_layers - short) / (long - short) if long > short else 0.0
        """Patterns beyond the short model; not whole where the layers are no multiple of the pattern."""
        self.models: tuple[nn.Module, ...] = tuple(_build(spec, config, dtype, length) for length in self.lengths)
        self._traces: dict[tuple[int, Layers], list[Trace]] = {}

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        fast: FastPath,
        document_tokens: int,
        shared_tokens: int = 0,
    ) -> Simulations:
        """Those made before for the same model, adapter and fast path, or new ones."""
        key = _Key(spec.adapter.model_dump_json(), config.to_json_string(), dtype, fast, document_tokens, shared_tokens)
        if key not in _SIMULATIONS:
            while len(_SIMULATIONS) >= _MOST_SIMULATIONS:
                del _SIMULATIONS[next(iter(_SIMULATIONS))]
            _SIMULATIONS[key] = cls(spec, config, dtype, fast, document_tokens, shared_tokens)
        return _SIMULATIONS[key]

    def extrapolated(self, count: Callable[[nn.Module], float]) -> int:
        """A number of the whole model, from the two that there are."""
        short, long = (count(model) for model in self.models)
        return round(short + (long - short) * self.num_extra)

    def traces(self, num_tokens: int, layers: Layers) -> list[Trace]:
        """Of the short and the longer model, with all layers treated alike."""
        if (num_tokens, layers) not in self._traces:
            shape = MicroBatchShape.of(num_tokens, self.document_tokens, self.shared_tokens)
            self._traces[num_tokens, layers] = [
                self.trace(model, shape, 0 if layers == "kept" else length, offload=layers == "offloaded")
                for model, length in zip(self.models, self.lengths, strict=True)
            ]
        return self._traces[num_tokens, layers]

    def trace(self, model: nn.Module, shape: MicroBatchShape, num_recomputed: int, *, offload: bool = False) -> Trace:
        """One micro-batch of a model of `meta_model`, forward and backward, gradients being there already."""
        inputs = shape.model_inputs()
        labels_T = torch.zeros(shape.num_tokens, dtype=torch.long)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        fast = dataclasses.replace(self.fast, recompute_layers=num_recomputed, offload=offload)
        with applied(model, fast), Simulator() as simulator:
            loss = self._loss(model, inputs, labels_T)
            simulator.mark("forward")
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return simulator.trace

    def _loss(self, model: nn.Module, inputs: dict[str, Any], labels_T: torch.Tensor) -> torch.Tensor:
        try:
            body, head = parts(model)
        except HeadNotLinear:
            logits_TV = model(**inputs).logits[0].float()
            return nn.functional.cross_entropy(logits_TV, labels_T.to("meta"), reduction="sum")
        hidden_TD = body(**inputs).last_hidden_state[0]
        return linear_cross_entropy(hidden_TD, head, labels_T, chunk_size=self.fast.loss_chunk_size).loss_sum


Layers = Literal["kept", "recomputed", "offloaded"]
_SIMULATIONS: dict[_Key, Simulations] = {}
_MOST_SIMULATIONS = 8


def _build(spec: RunSpec, config: PreTrainedConfig, dtype: torch.dtype, num_layers: int) -> nn.Module:
    model = meta_model(shortened(config, num_layers), dtype)
    adapter = _simulated(spec.adapter)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations, for models that never run
        return attach(model, adapter, seed=0).model.train()  # type: ignore[arg-type]  # a PreTrainedModel on meta


def _simulated(adapter: AdapterSpec) -> AdapterSpec:
    """An adapter of the same shapes that needs no data to start, and whose layers exist without bytes.

    The adapters of peft that rotate and rescale are simulated as LoRA of rank 16 on the same layers: their memory lies
    in the layers' inputs, which all of them keep, and not in their own few weights. Frozen first layers are simulated
    as trained; `Estimator.static` takes their gradients and optimizer states off again.
    """
    if isinstance(adapter, LoraAdapter):
        return adapter.model_copy(update={"init": "default", "init_from": None, "beside": []})
    if isinstance(adapter, FreezeAdapter | FullAdapter):
        return FullAdapter()
    return LoraAdapter(targets=adapter.targets, modules_to_save=adapter.modules_to_save)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """What a run holds and how long it takes on one device."""

    spec: RunSpec
    hardware: Hardware
    simulations: Simulations
    compiled: bool = False
    """Layers are compiled: what they keep and move is a measured share of what the simulation, uncompiled, says."""
    resident_bytes: int = 0
    """What is held beside the model, such as a teacher and frozen adapters."""

    @property
    def num_layers(self) -> int:
        return self.simulations.num_layers

    def static(self) -> StaticMemory:
        """Weights, gradients and optimizer states of the whole model."""
        short, long = self.simulations.models
        on_cuda = self.hardware.kind == "cuda"
        memory = static_memory(short, long, self.simulations.num_extra, self.spec.train.optimizer, on_cuda=on_cuda)
        if isinstance(self.spec.adapter, FreezeAdapter):
            memory = self._last_layers_only(memory, self.spec.adapter.num_layers)
        frozen = memory.frozen_weights - self.simulations.extrapolated(self._saved_by_quantization)
        if self.simulations.fast.fused:
            frozen += self.simulations.extrapolated(margin_bytes)
        return dataclasses.replace(memory, frozen_weights=frozen)

    def input_bytes(self, num_tokens: int) -> int:
        """Of one layer's input."""
        weight = cast(Any, self.simulations.models[0]).get_input_embeddings().weight
        return num_tokens * weight.shape[1] * weight.element_size()

    def _with_copies(self, recomputation: Work, whole: Work, num_tokens: int) -> Work:
        """A recomputed layer takes at least as long as its input needs out and back."""
        copies_s = 2 * self.input_bytes(num_tokens) / self.hardware.host_link_bytes_per_s
        layer_s = whole.device_s / self.num_layers
        return dataclasses.replace(recomputation, device_s=max(recomputation.device_s, copies_s - layer_s))

    def flops_per_token(self, micro_batch: MicroBatchEstimate) -> float:
        """Of the model's own work, nothing recomputed."""
        flops = micro_batch.kept.flops / micro_batch.num_tokens
        if self.simulations.fast.fused:
            flops -= self.simulations.extrapolated(padding_flops_per_token)
        return flops

    def num_weights(self) -> tuple[int, int]:
        """All weights, and the trained ones."""
        return (
            self.simulations.extrapolated(lambda model: sum(p.numel() for p in model.parameters())),
            self.simulations.extrapolated(lambda model: sum(p.numel() for p in model.parameters() if p.requires_grad)),
        )

    def _last_layers_only(self, memory: StaticMemory, num_trained: int) -> StaticMemory:
        """Of a model that was simulated as trained whole."""
        short, long = self.simulations.lengths
        first, second = (sum(p.nbytes for p in model.parameters()) for model in self.simulations.models)
        per_layer = (second - first) // (long - short) if long > short else first // short
        trained = min(num_trained, self.num_layers) * per_layer
        states = [
            optimizer_bytes(model, self.spec.train.optimizer, on_cuda=self.hardware.kind == "cuda")
            for model in self.simulations.models
        ]
        states_per_layer = (states[1] - states[0]) // (long - short) if long > short else states[0] // short
        return StaticMemory(
            frozen_weights=memory.frozen_weights + memory.trained_weights - trained,
            trained_weights=trained,
            gradients=trained,
            optimizer=min(num_trained, self.num_layers) * states_per_layer,
        )

    def _saved_by_quantization(self, model: nn.Module) -> float:
        per_weight = QUANTIZED_BYTES.get(self.spec.model.quantization)
        if per_weight is None:
            return 0
        return sum(
            module.weight.numel() * (module.weight.element_size() - per_weight)
            for layer in decoder_layers(model)
            for module in layer.modules()
            if isinstance(module, nn.Linear) and not module.weight.requires_grad
        )

    def micro_batch(self, num_tokens: int, *, recompute: bool = True, offload: bool = False) -> MicroBatchEstimate:
        """The estimate for a micro-batch of so many tokens; of recomputed layers too, where asked.

        With `offload` the inputs of recomputed layers are in host memory, and each is copied twice meanwhile.
        """
        short, long = self.simulations.lengths

        def per_layer(traces: list[Trace]) -> int:
            first, second = (trace.marks["forward"] for trace in traces)
            return int((second - first) / (long - short) if long > short else first / short)

        hardware = self.hardware
        if self.compiled:
            hardware = dataclasses.replace(
                hardware, bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s / _COMPILED_TRAFFIC
            )
        kept = self.simulations.traces(num_tokens, "kept")
        kept_work = [work_of(trace.operations, hardware) for trace in kept]
        forward_work = [work_of(t.operations[: t.operations_before["forward"]], hardware) for t in kept]
        host_share = _COMPILED_HOST if self.compiled else _FUSED_HOST if self.simulations.fast.fused else 1.0
        whole, forward = (
            dataclasses.replace(work, host_s=work.host_s * host_share)
            for work in (
                first + (second - first).times(self.simulations.num_extra)
                for first, second in (kept_work, forward_work)
            )
        )
        memory = LayerMemory(
            kept_base=kept[1].peak_bytes - per_layer(kept) * long,
            kept_per_layer=int(per_layer(kept) * (_COMPILED_KEPT if self.compiled else 1)),
        )
        if not recompute:
            return MicroBatchEstimate(
                num_tokens=num_tokens, memory=memory, kept=whole, forward=forward, num_layers=self.num_layers
            )

        recomputed = self.simulations.traces(num_tokens, "offloaded" if offload else "recomputed")
        recomputation = (work_of(recomputed[1].operations, hardware) - kept_work[1]).times(1 / long)
        recomputed_bytes = per_layer(recomputed)
        if self.compiled:
            recomputed_bytes = int(per_layer(kept) * _COMPILED_RECOMPUTED)
            recomputation = recomputation.times(_COMPILED_RECOMPUTED_WORK)
            host_share = _COMPILED_HOST / _COMPILED_RECOMPUTED_WORK
        elif not self.simulations.fast.fused:
            host_share = _CHECKPOINT_HOST
        recomputation = dataclasses.replace(recomputation, host_s=recomputation.host_s * host_share)
        if offload:
            recomputation = self._with_copies(recomputation, whole, num_tokens)
        memory = dataclasses.replace(
            memory,
            # copies out and back are under way for an input more each
            recomputed_base=recomputed[1].peak_bytes
            - per_layer(recomputed) * long
            + 2 * offload * self.input_bytes(num_tokens),
            recomputed_per_layer=recomputed_bytes,
        )
        return MicroBatchEstimate(
            num_tokens=num_tokens,
            memory=memory,
            kept=whole,
            forward=forward,
            recomputation=recomputation,
            num_layers=self.num_layers,
        )


_ADAFACTOR_BYTES = 110
"""What transformers' Adafactor reads and writes for a bfloat16 weight, in float32 and one operation after another:
0.8 s a step of 32B on an H200 (docs/performance.md)."""


def optimizer_work(static: StaticMemory, hardware: Hardware, optimizer: str = "adamw") -> Work:
    """What moves through memory once a step: the update reads weights, gradients and the optimizer's states and writes
    weights and states; clipping reads the gradients twice and writes them. Muon's products are not in it."""
    num_bytes = static.trained_weights * (3 + 3) + 2 * static.optimizer
    if optimizer == "adafactor":
        num_bytes += static.trained_weights // 2 * _ADAFACTOR_BYTES
    return Work(device_s=num_bytes / hardware.bandwidth_bytes_per_s, num_bytes=num_bytes)
