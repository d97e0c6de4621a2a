"""Guards: the chunked loss and log-probabilities equal a float64 reference that holds every logit, gradients too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from gym_trainer.fast import loss as fast_loss
from gym_trainer.fast.loss import OutputHead, linear_cross_entropy, linear_logprobs

T, D, V = 37, 16, 211
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.125},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 0.5, "softcap": 3.0},
}


def _inputs(dtype=torch.float64, bias=False, scale=1.0, softcap=None, device="cpu"):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    hidden, weight = draw(T, D), draw(V, D)
    head = OutputHead(weight_VD=weight, bias_V=draw(V) if bias else None, scale=scale, softcap=softcap)
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[torch.rand(T, generator=generator) < 0.4] = -100
    weights = torch.rand(T, generator=generator)
    return hidden, head, labels, weights


def _reference_logprobs(hidden, head, labels):
    logits = hidden.double() @ head.weight_VD.double().T
    if head.bias_V is not None:
        logits = logits + head.bias_V.double()
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    labels = labels.to(hidden.device)
    correct = (logits.argmax(-1) == labels).sum()
    return -cross_entropy(logits, labels, reduction="none", ignore_index=-100), correct


def _grads(value, hidden, head):
    inputs = [x for x in (hidden, head.weight_VD, head.bias_V) if x is not None]
    return torch.autograd.grad(value, inputs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 8, 1000])
@pytest.mark.parametrize("name", HEADS)
def test_cross_entropy_equals_the_reference(name, chunk_size, weighted):
    hidden, head, labels, weights = _inputs(**HEADS[name])
    result = linear_cross_entropy(hidden, head, labels, weights_T=weights if weighted else None, chunk_size=chunk_size)
    logprobs, correct = _reference_logprobs(hidden, head, labels)
    expected = -(logprobs * weights).sum() if weighted else -logprobs.sum()
    torch.testing.assert_close(result.loss_sum.double(), expected, rtol=1e-6, atol=0)
    assert result.num_tokens == int((labels != -100).sum())
    assert int(result.num_correct) == int(correct)
    for grad, reference in zip(
        _grads(result.loss_sum * 0.3, hidden, head), _grads(expected * 0.3, hidden, head), strict=True
    ):
        torch.testing.assert_close(grad, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [8, 1000])
@pytest.mark.parametrize("name", HEADS)
def test_logprobs_equal_the_reference(name, chunk_size):
    hidden, head, labels, weights = _inputs(**HEADS[name])
    logprobs = linear_logprobs(hidden, head, labels, chunk_size=chunk_size)
    expected, _ = _reference_logprobs(hidden, head, labels)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    assert (logprobs[labels == -100] == 0).all()
    upstream = weights - 0.5
    for grad, reference in zip(
        _grads((logprobs * upstream).sum(), hidden, head),
        _grads((expected * upstream).sum(), hidden, head),
        strict=True,
    ):
        torch.testing.assert_close(grad, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype):
    hidden, head, labels, _ = _inputs(dtype)
    result = linear_cross_entropy(hidden, head, labels, chunk_size=8)
    logprobs, _ = _reference_logprobs(hidden, head, labels)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result.loss_sum.double(), -logprobs.sum(), rtol=tolerance, atol=0)
    for grad, reference in zip(
        _grads(result.loss_sum, hidden, head), _grads(-logprobs.sum(), hidden, head), strict=True
    ):
        assert grad.dtype == dtype
        assert (grad.double() - reference.double()).norm() / reference.double().norm() < tolerance


def test_a_frozen_head_gets_no_gradient_and_costs_no_buffer():
    hidden, head, labels, _ = _inputs()
    frozen = OutputHead(weight_VD=head.weight_VD.detach())
    linear_cross_entropy(hidden, frozen, labels).loss_sum.backward()
    assert frozen.weight_VD.grad is None
    assert hidden.grad is not None


def test_evaluation_computes_no_gradients(monkeypatch):
    monkeypatch.setattr(fast_loss._Gradients, "add", lambda *args: pytest.fail("gradients in evaluation"))
    hidden, head, labels, _ = _inputs()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, head, labels).loss_sum > 0


def test_no_labels_is_a_loss_of_zero_with_zero_gradients():
    hidden, head, labels, _ = _inputs()
    result = linear_cross_entropy(hidden, head, torch.full_like(labels, -100))
    assert (result.loss_sum.item(), result.num_tokens) == (0.0, 0)
    assert all(not grad.any() for grad in _grads(result.loss_sum, hidden, head))


def test_chunks_bound_the_logits_that_exist(monkeypatch):
    rows = []
    reduce = fast_loss._reduce
    monkeypatch.setattr(fast_loss, "_reduce", lambda logits, *a: rows.append(logits.shape[0]) or reduce(logits, *a))
    hidden, head, labels, _ = _inputs()
    linear_cross_entropy(hidden, head, labels, chunk_size=8)
    assert max(rows) == 8
    assert sum(rows) == int((labels != -100).sum())


_INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from gym_trainer.fast import _loss_kernel, loss
torch.manual_seed(0)
for softcap in (None, 3.0):
    for factors in (None, torch.randn(6)):
        logits = torch.randn(6, 9001) * 4
        labels = torch.randint(0, 9001, (6,))
        expected = loss._reduce_torch(logits.clone(), labels, loss._Shape(0.5, softcap), factors)
        got = _loss_kernel.reduce(logits.clone(), labels, 0.5, softcap, factors)
        torch.testing.assert_close(got[0], expected.logprobs_C, rtol=1e-5, atol=1e-5)
        assert got[1].tolist() == expected.correct_C.tolist()
        if factors is not None:
            torch.testing.assert_close(got[2], expected.grad_logits_CV, rtol=1e-4, atol=1e-6)
print("equal")
"""


def test_the_triton_kernel_interpreted_on_the_processor_equals_torch():
    pytest.importorskip("triton", minversion="3.7", reason="older interpreters fail with numpy 2.4 and newer")
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr
