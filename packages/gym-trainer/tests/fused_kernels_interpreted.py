"""Run by test_fast_fused in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.

Each kernel against the plain operation, on odd sizes and strided rows, in outputs filled with NaN.
"""

from __future__ import annotations

import sys

import torch

from gym_trainer.fast.fused import _kernels as kernels
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

    both, outs = draw(T, 2 * D, 3), [empty(T, D) for _ in range(2)]
    kernels.swiglu(both, outs[0])
    ops.swiglu(both, outs[1])
    check("swiglu", (outs[0], outs[1]))
    grads, boths = [draw(T, D, 1)] * 2, [both.clone(), both.clone()]
    grads = [grads[0].clone(), grads[0].clone()]
    kernels.swiglu_backward(boths[0], grads[0])
    ops.swiglu_backward_(boths[1], grads[1])
    check("swiglu_backward", (boths[0], boths[1]), (grads[0], grads[1]))

    small, outs, copies = draw(N, D, 2), [empty(T, N) for _ in range(2)], [empty(T, D) for _ in range(2)]
    kernels.project(x, small, outs[0], copies[0])
    ops.project(x, small, outs[1], copy_TI=copies[1])
    turned = [empty(T, N) for _ in range(2)]
    turned_small = draw(D, N).T
    kernels.project(x, turned_small, turned[0], None)
    ops.project(x, turned_small, turned[1])
    check("project", (outs[0], outs[1]), (copies[0], copies[1]), (turned[0], turned[1]))
    tall, tall_small = draw(300, D, 2), draw(300, N, 1)
    scales = torch.rand(300, generator=generator)
    check(
        "reduce_rows",
        (kernels.reduce_rows(tall_small, tall, None), ops.reduce_rows(tall_small, tall)),
        (
            kernels.reduce_rows(tall_small, tall, (scales, weight)),
            ops.reduce_rows(tall_small, tall, norm=(scales, weight)),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
