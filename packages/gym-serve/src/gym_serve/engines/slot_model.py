"""A transformers model run by slots: one packed row a step, keys and values in a `SlotCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from transformers import AttentionInterface

from gym_sdk.errors import ModelError
from gym_serve.engines.packed import PackedLinears
from gym_serve.engines.slots import ATTENTION, GROWTH_TOKENS, Segment, SlotCache, StepLayout, attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gym_serve.engines.lora import AdapterBank
    from gym_serve.engines.scheduler import StepPlan

AttentionInterface.register(ATTENTION, attend)


class SlotModel:
    """Uses a model in place, in evaluation mode, until `close` gives it back as it was."""

    def __init__(self, model: PreTrainedModel | PeftModel, *, pack_weights: bool) -> None:
        """Raises ModelError for a model whose attention cannot be run by slots."""
        self._model = model
        self.base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[assignment]
        text_config = self.base.config.get_text_config()
        self.max_positions: int = int(text_config.max_position_embeddings)
        self.vocab_size: int = int(text_config.vocab_size)
        self.device: torch.device = next(self.base.parameters()).device
        self._dtype = self.base.dtype
        self._was_training = model.training
        self._attention_before = _attention_of(self.base)
        _check_layers(self.base)
        model.eval()
        self.base.set_attn_implementation(ATTENTION)
        self._packed = PackedLinears(self.base, free_bytes=free_bytes(self.device)) if pack_weights else None
        try:
            self.bytes_per_position: int = self._measure()
        except BaseException:
            self.close()
            raise

    def forward(self, plan: StepPlan, cache: SlotCache, bank: AdapterBank) -> torch.Tensor:
        """Run the model on a step's packed row; the logits [N, V] of the rows that are complete."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments: list[Segment] = []
        last: list[int] = []
        runs: list[tuple[str | None, int]] = []
        for row in plan.rows:
            begin = len(ids)
            ids.extend(row.ids)
            positions.extend(range(row.start, row.start + len(row.ids)))
            slots.extend([row.slot] * len(row.ids))
            runs.append((row.running.request.adapter, len(row.ids)))
            if not row.decodes:
                segments.append(Segment(row.slot, begin, len(ids), row.start))
            if row.completes:
                last.append(len(ids) - 1)
        device = self.device
        positions_T = torch.tensor(positions, device=device)
        layout = StepLayout(
            cache=cache,
            num_decoding=plan.num_decoding,
            segments=segments,
            slots_T=torch.tensor(slots, device=device),
            positions_T=positions_T,
            longest=max(positions[: plan.num_decoding], default=0) + 1,
            dtype=self._dtype,
        )
        bank.begin_step(runs)
        output = self.base(
            input_ids=torch.tensor([ids], device=device),
            position_ids=positions_T[None],
            use_cache=False,
            logits_to_keep=torch.tensor(last or [0], device=device),
            step_layout=layout,
        )
        return output.logits[0]

    def close(self) -> None:
        """Gives the model back."""
        if self._packed is not None:
            self._packed.remove()
        self.base.set_attn_implementation(self._attention_before)
        self._model.train(self._was_training)

    def _measure(self) -> int:
        """The bytes of one cached position, from a step of one token; also shows that attention arrives here."""
        cache = SlotCache(max_slots=1, max_tokens=GROWTH_TOKENS)
        cache.reserve(1, 1)
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        layout = StepLayout(
            cache=cache, num_decoding=1, segments=[], slots_T=zero, positions_T=zero, longest=1, dtype=self._dtype
        )
        with torch.inference_mode():
            self.base(
                input_ids=zero[None], position_ids=zero[None], use_cache=False, logits_to_keep=zero, step_layout=layout
            )
        if not cache.measure():
            raise ModelError(f"{type(self.base).__name__} does not attend through transformers' attention interface")
        return cache.measure()


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse models with layers that keep a state other than keys and values, which slots do not hold."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ModelError(
            f"{type(model).__name__} has {other[0]} layers, which the embedded engine does not run",
            hint="serve it with vLLM, or run it with transformers' own generate",
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{type(model).__name__} does not attend through transformers' attention interface")


def _attention_of(model: PreTrainedModel) -> str:
    # transformers sets it through a method and shows it through nothing public.
    return model.config._attn_implementation or "eager"  # pyright: ignore[reportPrivateUsage]


def free_bytes(device: torch.device) -> int:
    """Memory that is free where the model is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
