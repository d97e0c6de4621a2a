"""Run by test_fast_fused in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.

Each kernel against the plain operation, on odd sizes and strided rows, in outputs filled with NaN.
"""

from __future__ import annotations

import sys

import torch

from gym_trainer.fast.fused import _gather_kernels as gather
from gym_trainer.fast.fused import _kernels as kernels
from gym_trainer.fast.fused import _lora_kernels as lora
from gym_trainer.fast.fused import elementwise as ops

T, D, H, K, E, N = 21, 48, 3, 1, 16, 16
generator = torch.Generator().manual_seed(0)


def draw(rows: int, width: int, gap: int = 0) -> torch.Tensor:
    """Rows with a gap of NaN between them."""
    whole = torch.full((rows, width + gap), float("nan"))
    whole[:, :width] = torch.randn(rows, width, generator=generator)
    return whole[:, :width]


def empty(rows: int, width: int) -> torch.Tensor:
    return torch.full((rows, width + 3), float("nan"))[:, :width]


def check(name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, msg=lambda text: f"{name}: {text}")
    print(name)


def main() -> int:
    x, delta, weight = draw(T, D, 5), draw(T, D, 2), draw(1, D)[0]
    outs, sums = [empty(T, D) for _ in range(2)], [empty(T, D) for _ in range(2)]
    rstd = kernels.rms_norm(x, weight, 1e-5, outs[0], None, None)
    check("rms_norm", (rstd, ops.rms_norm(x, weight, 1e-5, outs[1])), (outs[0], outs[1]))
    kernels.rms_norm(x, weight, 1e-5, outs[0], delta, sums[0])
    ops.rms_norm(x, weight, 1e-5, outs[1], delta_TD=delta, sum_TD=sums[1])
    check("add_rms_norm", (outs[0], outs[1]), (sums[0], sums[1]))
    grad, residual = draw(T, D, 1), draw(T, D, 4)
    kernels.rms_norm_backward(grad, x, weight, rstd, residual, outs[0])
    ops.rms_norm_backward(grad, x, weight, rstd, residual, outs[1])
    check("rms_norm_backward", (outs[0], outs[1]))

    qkv, cos, sin = draw(T, (H + 2 * K) * E, 7), draw(T, E), draw(T, E)
    pairs, backward_pairs = [], []
    for norms in (None, ops.HeadNorms(draw(1, E)[0], draw(1, E)[0], 1e-5, 1e-3)):
        heads = [(torch.full((T, H, E), float("nan")), torch.full((T, K, E), float("nan"))) for _ in range(2)]
        weights, eps = (None, (0.0, 0.0)) if norms is None else (norms[:2], norms[2:])
        kernels.rotate(qkv, cos, sin, weights, eps, *heads[0])
        ops.rotate(qkv, cos, sin, norms, *heads[1])
        pairs += list(zip(*heads, strict=True))
        grads = [draw(n, T * E).unflatten(1, (T, E)).transpose(0, 1) for n in (H, K, K)]
        outs = [empty(T, (H + 2 * K) * E) for _ in range(2)]
        kernels.rotate_backward(*grads, qkv, cos, sin, weights, eps, outs[0])
        ops.rotate_backward(*grads, qkv, cos, sin, norms, outs[1])
        backward_pairs.append((outs[0], outs[1]))
    check("rotate", *pairs)
    check("rotate_backward", *backward_pairs)

    both, grad, outs = draw(T, 2 * D, 3), draw(T, D, 1), [empty(T, D) for _ in range(2)]
    kernels.swiglu(both, outs[0])
    ops.swiglu(both, outs[1])
    check("swiglu", (outs[0], outs[1]))
    grads, boths = [grad.clone(), grad.clone()], [both.clone(), both.clone()]
    kernels.swiglu_backward(boths[0], grads[0])
    ops.swiglu_backward_(boths[1], grads[1])
    check("swiglu_backward", (boths[0], boths[1]), (grads[0], grads[1]))

    small = draw(N, D, 2)
    outs, copies, seconds = ([empty(T, n) for _ in range(2)] for n in (N, D, N))
    lora.project(x, small, outs[0], copies[0], seconds[0])
    ops.project(x, small, outs[1], copy_TI=copies[1], second_TN=seconds[1])
    turned, turned_small = [empty(T, N) for _ in range(2)], draw(D, N).T
    lora.project(x, turned_small, turned[0], None, None)
    ops.project(x, turned_small, turned[1])
    check("project", *((a[0], a[1]) for a in (outs, copies, seconds, turned)))
    tall, tall_small = draw(300, D, 2), draw(300, N, 1)
    scales = torch.rand(300, generator=generator)
    check(
        "reduce_rows",
        (lora.reduce_rows(tall_small, tall, None).sum(0), ops.reduce_rows(tall_small, tall)[0]),
        (
            lora.reduce_rows(tall_small, tall, (scales, weight)).sum(0),
            ops.reduce_rows(tall_small, tall, norm=(scales, weight))[0],
        ),
    )

    parts_a, parts_b = torch.randn(3, N, D, generator=generator), torch.randn(2, N, 70, generator=generator)
    pieces = [((0, 2, 0, 4, D, 0), 1.5), ((1, 2, 10, 30, 4, 4 * D), 1.0)]
    flat = gather.collect(parts_a, parts_b, gather.gradients_of(pieces, torch.device("cpu")), torch.float32)
    got_a, got_b = flat.split([4 * D, 120])
    check(
        "collect",
        (got_a.view(4, D), 1.5 * parts_a.sum(0)[2:6]),
        (got_b.view(30, 4), parts_b.sum(0)[2:6, 10:40].T),
    )

    target = torch.full((40, 20), float("nan"))
    sources = [torch.randn(5, 7, generator=generator), torch.randn(9, 3, generator=generator)]
    gather.Scatter([target[2:7, 1:8], target[20:29, 4:7]], [2.0, -1.0])(sources)
    check("scatter", (target[2:7, 1:8], 2 * sources[0]), (target[20:29, 4:7], -sources[1]))
    assert int(target.isnan().sum()) == 800 - 35 - 27
    return 0


if __name__ == "__main__":
    sys.exit(main())
