"""A decoder layer whose base is frozen, forward and backward written out.

Autograd keeps what each operator asks for, and runs LoRA's small products and the pieces between the large ones as
operators of their own. Here the backward pass is written by hand: it keeps the layer's input, the projections before
their activation and the attention's own tensors, and makes everything else again on the way. Where a layer is
recomputed it keeps its input only, and computes again all but the last matrix product, whose result nothing needs.

Legend: B rows, L their length, T = B * L tokens, D hidden size, H query heads, K key and value heads, E head dimension,
O outputs of joined layers, N their columns of LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers import AttentionInterface

from gym_trainer.fast.fused import elementwise as ops
from gym_trainer.fast.fused.offload import HostStore
from gym_trainer.fast.fused.weights import JoinedWeight, Refresh
from gym_trainer.fast.loss import without_autocast


@dataclass
class _Kept:
    """What the backward pass needs, beside the layer's input."""

    rstd_in_T: torch.Tensor
    qkv_TO: torch.Tensor
    qkv_lora_TN: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    """Leaves of the attention's own graph."""
    attended: torch.Tensor
    out_lora_TN: torch.Tensor
    middle_TD: torch.Tensor
    """The residual stream after attention."""
    rstd_middle_T: torch.Tensor
    both_TO: torch.Tensor
    """Gate and up, with room for LoRA's columns of their gradient."""
    both_lora_TN: torch.Tensor
    down_lora_TN: torch.Tensor | None = None


@dataclass(frozen=True)
class _Call:
    """One forward of a layer: what is not a tensor to be differentiated."""

    layer: FusedLayer
    cos_TE: torch.Tensor
    sin_TE: torch.Tensor
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Attention of [B, H, L, E], [B, K, L, E] twice, to [B, L, H, E]."""
    has_backward: bool
    adapted: bool = True
    """With LoRA's part; a model whose adapter is switched off has zeros in its columns."""


class FusedLayer:
    """The fused form of one decoder layer. It reads the layer's own modules, and changes where their weights lie."""

    refresh: Refresh | None = None
    """Of the whole model, for its first layer to call."""

    def __init__(self, layer: nn.Module, *, recompute: bool, store: HostStore | None = None) -> None:
        """`recompute`: keep the layer's input only, in `store` where there is one."""
        module = cast(Any, layer)
        attention, mlp = module.self_attn, module.mlp
        self.layer: nn.Module = layer
        self.attention: Any = attention
        self.recompute: bool = recompute
        self.store: HostStore | None = store
        self.own_forward: Callable[..., Any] = layer.forward
        self.qkv: JoinedWeight = JoinedWeight([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out: JoinedWeight = JoinedWeight([attention.o_proj])
        self.both: JoinedWeight = JoinedWeight([mlp.gate_proj, mlp.up_proj])
        self.down: JoinedWeight = JoinedWeight([mlp.down_proj])
        self._lora = [m for m in layer.modules() if isinstance(m, LoraLinear)]
        self._adapters = self._active()
        self.norm_in: Any = module.input_layernorm
        self.norm_middle: Any = module.post_attention_layernorm
        self.head_dim: int = attention.head_dim
        self.num_heads: int = self.qkv.parts[0].base.out_features // self.head_dim
        self.num_key_heads: int = self.qkv.parts[1].base.out_features // self.head_dim
        self.head_norms: ops.HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm, attention.k_norm
            self.head_norms = ops.HeadNorms(
                query.weight.data, key.weight.data, query.variance_epsilon, key.variance_epsilon
            )

    @property
    def joined(self) -> tuple[JoinedWeight, ...]:
        return self.qkv, self.out, self.both, self.down

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """In place of the layer's own forward, which still serves generation and whatever else is no training.

        Packed documents are served without gradients, too, with the adapter or without it: what a preference method
        compares is then rounded alike, and an untrained policy's log-probabilities are its reference's.
        """
        has_backward, adapted = torch.is_grad_enabled(), not any(module.disable_adapters for module in self._lora)
        if has_backward:
            fits = self.layer.training and adapted
        else:
            fits = "cu_seq_lens_q" in kwargs and (adapted or all(module.disable_adapters for module in self._lora))
        fits = fits and self._active() == self._adapters  # another adapter may answer for a reference
        if position_embeddings is None or not fits or self._is_plain(kwargs):
            return self.own_forward(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        num_rows, length, _ = hidden_states.shape
        cos_TE, sin_TE = (x.expand(num_rows, length, -1).flatten(0, 1) for x in position_embeddings)
        if self.refresh is not None and adapted:
            self.refresh()
        kwargs = {name: value for name, value in kwargs.items() if name not in _CACHE_ARGUMENTS}
        call = _Call(self, cos_TE, sin_TE, self._attention(attention_mask, kwargs), has_backward, adapted)
        trained = [weight for joined in self.joined for weight in joined.trained]
        return _FusedLayer.apply(hidden_states, call, *trained)

    def _active(self) -> list[str]:
        return [module.active_adapters[0] for module in self._lora]

    def release(self) -> None:
        """Give the layer's modules weights of their own again."""
        for joined in self.joined:
            joined.release()

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
            return True
        return any(module.merged for module in self._lora)

    def _attention(self, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> Callable[..., torch.Tensor]:
        module = self.attention
        function = AttentionInterface()[module.config._attn_implementation]
        # Mistral's layers take it from the configuration, where others have their own or none
        window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            out, _ = function(
                module,
                query,
                key,
                value,
                mask,
                dropout=0.0,
                scaling=module.scaling,
                sliding_window=window,
                **kwargs,
            )
            return out

        return attend


_CACHE_ARGUMENTS = {"past_key_values", "cache", "use_cache", "cache_position"}


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: torch.Tensor, call: _Call, *trained: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.shape = call, x_BLD.shape
        recompute = call.layer.recompute
        with without_autocast(x_BLD.device):
            x_TD = x_BLD.flatten(0, 1)
            kept = _up_to_gate(call, x_TD, x_BLD.shape[:2], with_graph=call.has_backward and not recompute)
            activated = _activate(call, kept)
            y_TD = call.layer.down.forward(activated)
            y_TD += kept.middle_TD
        ctx.stored = None
        if recompute and call.layer.store is not None and call.has_backward:
            ctx.stored = call.layer.store.put(x_TD)
        else:
            ctx.save_for_backward(x_TD)
        ctx.down_lora_TN = kept.down_lora_TN
        ctx.kept = None if recompute else kept
        return y_TD.view(ctx.shape)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's own stub takes any
        ctx: Any, grad_BLD: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        if ctx.stored is not None:
            assert call.layer.store is not None
            x_TD = call.layer.store.take(ctx.stored)
            ctx.stored = None
        else:
            (x_TD,) = ctx.saved_tensors
        with without_autocast(x_TD.device):
            kept = ctx.kept
            if call.layer.recompute:
                kept = _up_to_gate(call, x_TD, ctx.shape[:2], with_graph=True)
                kept.down_lora_TN = ctx.down_lora_TN
            if kept is None:
                raise RuntimeError("a fused layer's backward pass runs once: it reuses the memory of what it kept")
            ctx.kept = None
            grad_middle, grads_mlp = _mlp_backward(call, kept, grad_BLD.flatten(0, 1))
            grad_x, grads_attention = _attention_backward(
                call, kept, x_TD, ctx.shape[:2], grad_middle, need_input=ctx.needs_input_grad[0]
            )
        return (None if grad_x is None else grad_x.view(ctx.shape), None, *grads_attention, *grads_mlp)


def _up_to_gate(call: _Call, x_TD: torch.Tensor, rows: torch.Size, *, with_graph: bool) -> _Kept:
    """The layer up to gate and up."""
    layer = call.layer
    whole, normed, lora = layer.qkv.input_like(x_TD)
    rstd_in = ops.rms_norm(x_TD, layer.norm_in.weight.data, layer.norm_in.variance_epsilon, normed)
    qkv_lora = _lora(call, layer.qkv, normed, lora)
    qkv_TO = layer.qkv.forward(whole)
    del whole, normed, lora

    query_THE = qkv_TO.new_empty(len(qkv_TO), layer.num_heads, layer.head_dim)
    key_TKE = qkv_TO.new_empty(len(qkv_TO), layer.num_key_heads, layer.head_dim)
    ops.rotate(qkv_TO, call.cos_TE, call.sin_TE, layer.head_norms, query_THE, key_TKE)
    value_TKE = qkv_TO[:, -key_TKE[0].numel() :].unflatten(-1, (-1, layer.head_dim))
    query, key, value = (
        x.unflatten(0, rows).transpose(1, 2).detach().requires_grad_(with_graph)
        for x in (query_THE, key_TKE, value_TKE)
    )
    with torch.set_grad_enabled(with_graph):
        attended = call.attend(query, key, value)

    whole, copied, lora = layer.out.input_like(x_TD)
    attended_TI = attended.detach().reshape(len(x_TD), -1)
    out_lora = _lora(call, layer.out, attended_TI, lora, copied=copied)
    middle_TD = layer.out.forward(whole)
    del whole, copied, lora

    whole, normed, lora = layer.both.input_like(x_TD)
    norm = layer.norm_middle
    rstd_middle = ops.rms_norm(
        x_TD, norm.weight.data, norm.variance_epsilon, normed, delta_TD=middle_TD, sum_TD=middle_TD
    )
    both_lora = _lora(call, layer.both, normed, lora)
    both_TO, both, _ = layer.both.output_like(x_TD)
    layer.both.forward(whole, out_TO=both)
    return _Kept(
        rstd_in_T=rstd_in,
        qkv_TO=qkv_TO,
        qkv_lora_TN=qkv_lora,
        query=query,
        key=key,
        value=value,
        attended=attended,
        out_lora_TN=out_lora,
        middle_TD=middle_TD,
        rstd_middle_T=rstd_middle,
        both_TO=both_TO,
        both_lora_TN=both_lora,
    )


def _activate(call: _Call, kept: _Kept) -> torch.Tensor:
    down = call.layer.down
    whole, product, lora = down.input_like(kept.middle_TD)
    ops.swiglu(kept.both_TO[:, : call.layer.both.num_outputs], product)
    kept.down_lora_TN = _lora(call, down, product, lora)
    return whole


def _lora(
    call: _Call,
    joined: JoinedWeight,
    x_TI: torch.Tensor,
    lora_TN: torch.Tensor,
    *,
    copied: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x A^T` beside `x`, and once more by itself for the gradient of B; zeros without the adapter."""
    if not call.adapted:
        if copied is not None:
            copied.copy_(x_TI)
        return lora_TN.zero_()
    second_TN = _columns(lora_TN)
    ops.project(x_TI, joined.lora_a, lora_TN, copy_TI=copied, second_TN=second_TN)
    return second_TN


def _columns(lora_TN: torch.Tensor) -> torch.Tensor:
    """Room for columns of LoRA that outlives the large matrix beside them."""
    return lora_TN.new_empty(lora_TN.shape)


def _mlp_backward(
    call: _Call, kept: _Kept, grad_TD: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """The gradient of the residual stream after attention, with room for LoRA's columns; of the MLP's A and B."""
    layer = call.layer
    down, both = layer.down, layer.both
    assert kept.down_lora_TN is not None
    whole, copied, lora = down.output_like(grad_TD)
    down_lora = _columns(lora)
    ops.project(grad_TD, down.lora_b, lora, copy_TI=copied, second_TN=down_lora)
    product = down.backward(whole)
    del whole, copied, lora

    grad_both, grad_lora = kept.both_TO[:, : both.num_outputs], kept.both_TO[:, both.num_outputs :]
    ops.swiglu_backward_(grad_both, product)  # product: its gradient before, itself after
    ops.project(grad_both, both.lora_b, grad_lora)
    grads_down = _gradients(down, down_lora, product, None, grad_TD, kept.down_lora_TN)
    del product

    grad_normed = both.backward(kept.both_TO)
    norm = (kept.rstd_middle_T, layer.norm_middle.weight.data)
    grads_both = _gradients(both, grad_lora, kept.middle_TD, norm, grad_both, kept.both_lora_TN)
    whole, grad_middle, _ = layer.out.output_like(grad_TD)
    ops.rms_norm_backward(grad_normed, kept.middle_TD, norm[1], norm[0], grad_TD, grad_middle)
    return (whole, grad_middle), [*grads_both, *grads_down]


def _attention_backward(
    call: _Call,
    kept: _Kept,
    x_TD: torch.Tensor,
    rows: torch.Size,
    grad_middle: tuple[torch.Tensor, torch.Tensor],
    *,
    need_input: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    layer = call.layer
    whole, grad_TD = grad_middle
    grad_lora = whole[:, layer.out.num_outputs :]
    ops.project(grad_TD, layer.out.lora_b, grad_lora)
    grad_attended = layer.out.backward(whole)
    attended_TI = kept.attended.detach().reshape(len(x_TD), -1)
    grads_out = _gradients(layer.out, grad_lora, attended_TI, None, grad_TD, kept.out_lora_TN)

    leaves = (kept.query, kept.key, kept.value)
    grad_heads = torch.autograd.grad(kept.attended, leaves, grad_attended.view(kept.attended.shape))
    query, key, value = (grad.transpose(1, 2).reshape(len(x_TD), -1, layer.head_dim) for grad in grad_heads)
    del grad_heads, grad_attended
    grad_whole, grad_qkv, grad_lora = layer.qkv.output_like(x_TD)
    ops.rotate_backward(query, key, value, kept.qkv_TO, call.cos_TE, call.sin_TE, layer.head_norms, grad_qkv)
    ops.project(grad_qkv, layer.qkv.lora_b, grad_lora)
    norm = (kept.rstd_in_T, layer.norm_in.weight.data)
    grads_qkv = _gradients(layer.qkv, grad_lora, x_TD, norm, grad_qkv, kept.qkv_lora_TN)
    grad_x = None
    if need_input:
        grad_normed = layer.qkv.backward(grad_whole)
        grad_x = torch.empty_like(x_TD)
        ops.rms_norm_backward(grad_normed, x_TD, norm[1], norm[0], grad_TD, grad_x)
    return grad_x, [*grads_qkv, *grads_out]


def _gradients(
    joined: JoinedWeight,
    grad_lora_TN: torch.Tensor,
    x_TI: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    grad_TO: torch.Tensor,
    lora_TN: torch.Tensor,
) -> list[torch.Tensor]:
    """Of A from the layers' input, which is the norm of `x` where `norm` is given; of B from the outputs' gradient."""
    if not joined.trained:
        return []
    parts_a_SNI = ops.reduce_rows(grad_lora_TN, x_TI, norm=norm)
    parts_b_SNO = ops.reduce_rows(lora_TN, grad_TO)
    return joined.gradients(parts_a_SNI, parts_b_SNO)
