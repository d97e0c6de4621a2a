"""Guards the step: micro-batching, packing and out-of-memory never change its loss or gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_rows import TinyStore, tiny_model, tiny_store
from transformers import AutoModelForCausalLM, Cohere2Config, Gemma2Config, GraniteConfig, PreTrainedConfig

from gym_data import Document
from gym_sdk.errors import RunFailed
from gym_trainer.loop.batch import IGNORED, Row, StoreRows, make_micro_batch
from gym_trainer.loop.dataset import StepDataset, share
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.loop.step import StepRunner
from gym_trainer.objectives.base import LossSum, Ratio
from gym_trainer.objectives.sft import SftObjective

CPU = torch.device("cpu")


def reference_loss(model: torch.nn.Module, store: TinyStore) -> torch.Tensor:
    """The mean over all trained tokens, written out: one document at a time, in float64, without any of Gym's code."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document in store.documents:
        ids = torch.tensor(document.ids.astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0].double()
        logprobs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
        trained = torch.tensor(document.loss_mask[1:] != 0)
        total = total - logprobs[:-1].gather(1, ids[1:, None]).squeeze(1)[trained].sum()
        count += int(trained.sum())
    return total / count


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: torch.nn.Module, store: TinyStore, *, tokens: int, layout: str = "packed", **options: object):
    model.zero_grad()
    step = StepDataset(StoreRows(store), batch_size=len(store), seed=0)[0]
    runner = StepRunner(SftObjective(), micro_batch_tokens=tokens, layout=layout, device=CPU, **options)
    return runner.run(ForwardModel(model), step, backward=lambda loss: loss.backward())


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("tokens", "num_micro_batches"), [(60, "many"), (300, "some"), (10_000, "one")])
def test_loss_and_gradient_equal_a_float64_reference_for_every_micro_batch_size(
    layout: str, tokens: int, num_micro_batches: str
) -> None:
    store, model = tiny_store(64), tiny_model(dtype=torch.float64)
    expected = reference_loss(model, store)
    expected.backward()
    expected_gradients = gradients(model)

    result = run(model, store, tokens=tokens, layout=layout)

    assert {"many": result.num_micro_batches >= 16, "some": 4 <= result.num_micro_batches <= 16}.get(
        num_micro_batches, result.num_micro_batches == 1
    )
    assert result.loss == pytest.approx(expected.item(), rel=2e-6)
    assert result.num_trained_tokens == sum(int(d.loss_mask[1:].sum()) for d in store.documents)
    assert gradients(model).keys() == expected_gradients.keys()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-8, msg=name)


def test_the_logged_loss_does_not_grow_with_accumulation() -> None:
    store, model = tiny_store(64), tiny_model()
    losses = [run(model, store, tokens=tokens).loss for tokens in (60, 120, 240, 10_000)]
    assert np.ptp(losses) < 1e-5 * losses[0]


def test_token_accuracy_counts_the_tokens_predicted_right() -> None:
    store, model = tiny_store(8), tiny_model()
    right = count = 0
    for document in store.documents:
        ids = torch.tensor(document.ids.astype(np.int64))
        predicted = model(input_ids=ids[None]).logits[0].argmax(-1)
        trained = torch.tensor(document.loss_mask[1:] != 0)
        right += int((predicted[:-1] == ids[1:])[trained].sum())
        count += int(trained.sum())
    assert run(model, store, tokens=64).metrics["token_accuracy"] == (right, count)


def test_labels_are_the_next_trained_token_and_never_cross_a_document() -> None:
    store = tiny_store(3, min_length=4, max_length=4)
    for document in store.documents:
        document.loss_mask[:] = [1, 0, 1, 1]  # a document that is trained from its very first token
    batch = make_micro_batch([StoreRows(store).row(i) for i in range(3)], layout="packed", device=CPU)
    expected = [label for d in store.documents for label in [IGNORED, int(d.ids[2]), int(d.ids[3]), IGNORED]]
    assert batch.labels_T.tolist() == expected
    assert batch.position_ids.tolist() == [[0, 1, 2, 3] * 3]
    assert batch.model_inputs()["cu_seq_lens_q"].tolist() == [0, 4, 8, 12]
    assert batch.document_ids_T.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def _pair(chosen: list[int], rejected: list[int], prompt: int, trained_from: int | None = None) -> Row:
    documents = []
    for ids in (chosen, rejected):
        mask = np.arange(len(ids)) >= (prompt if trained_from is None else trained_from)
        documents.append(Document(np.array(ids, np.uint32), mask.astype(np.uint8), 0))
    return Row(index=0, documents=tuple(documents))


def test_what_a_pair_begins_with_alike_stands_once_but_for_the_token_that_predicts_both_answers() -> None:
    pairs = [_pair([1, 2, 3, 7, 8], [1, 2, 3, 9], prompt=3), _pair([4, 5, 6], [4, 5, 6, 6], prompt=2)]
    batch = make_micro_batch(pairs, layout="shared", device=CPU)
    assert batch.input_ids.tolist() == [[1, 2, 3, 7, 8, 3, 9, 4, 5, 6, 5, 6, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 1, 2, 3]]
    x = IGNORED
    assert batch.labels_T.tolist() == [x, x, 7, 8, x, 9, x, x, 6, x, 6, 6, x]
    assert batch.document_ids_T.tolist() == [0] * 5 + [1] * 2 + [2] * 3 + [3] * 3
    assert batch.last_positions_D.tolist() == [4, 6, 9, 12]
    assert batch.num_tokens == 16
    assert [pair.num_positions("shared") for pair in pairs] == [7, 6]
    assert [pair.num_positions("packed") for pair in pairs] == [9, 7]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "trained_from", "shared"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 3, None, 2),  # the same answer twice: still trained twice
        ([1, 2, 3, 4], [1, 2, 3, 4], 4, None, 3),  # nothing is trained: a token of its own is left
        ([1, 2, 3], [1, 2, 3, 4], 3, None, 2),
        ([1, 2, 3, 4], [5, 2, 3, 4], 3, None, 0),
        ([1, 2, 3, 4], [1, 5, 3, 4], 3, None, 1),
        ([1, 2, 3, 4], [1, 2, 3, 5], 3, 1, 0),  # the prompt is trained, too
        ([1, 2], [1], 1, None, 0),
    ],
)
def test_only_untrained_tokens_are_shared(
    chosen: list[int], rejected: list[int], prompt: int, trained_from: int | None, shared: int
) -> None:
    assert _pair(chosen, rejected, prompt, trained_from).prefix_lengths() == [0, shared]


class _RunsOutOfMemory(SftObjective):
    """Fails like CUDA's allocator whenever a micro-batch has more than `limit` tokens, after some gradients are in."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.failures = 0

    def loss(self, model, micro_batch, statistics) -> LossSum:
        result = super().loss(model, micro_batch, statistics)
        if micro_batch.num_tokens > self.limit:
            result.loss.backward()
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return result


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step() -> None:
    store, model = tiny_store(64), tiny_model()
    expected = run(model, store, tokens=4000)
    expected_gradients = gradients(model)

    model.zero_grad()
    halved: list[tuple[int, int]] = []
    objective = _RunsOutOfMemory(limit=300)
    runner = StepRunner(
        objective, micro_batch_tokens=4000, layout="packed", device=CPU, on_out_of_memory=lambda *h: halved.append(h)
    )
    step = StepDataset(StoreRows(store), batch_size=64, seed=0)[0]
    result = runner.run(ForwardModel(model), step, backward=lambda loss: loss.backward())

    assert objective.failures == len(halved) == 3
    assert runner.micro_batch_tokens <= 300
    assert result.loss == pytest.approx(expected.loss, rel=2e-6)
    assert result.num_trained_tokens == expected.num_trained_tokens
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_out_of_memory_repeats_the_step_with_the_same_dropout() -> None:
    from peft import LoraConfig, get_peft_model

    store = tiny_store(12, min_length=20, max_length=20)
    step = StepDataset(StoreRows(store), batch_size=12, seed=0)[0]
    losses = []
    for objective, tokens in [(SftObjective(), 40), (_RunsOutOfMemory(40), 80)]:
        model = get_peft_model(tiny_model(), LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))
        for parameter in model.parameters():
            parameter.data.fill_(0.02) if parameter.requires_grad else None
        model.train()
        torch.manual_seed(1)
        runner = StepRunner(objective, micro_batch_tokens=tokens, layout="packed", device=CPU)
        losses.append(runner.run(ForwardModel(model), step, backward=lambda loss: loss.backward()).loss)
    assert losses[0] == losses[1]


def test_a_row_that_does_not_fit_alone_ends_the_run_with_what_would_help() -> None:
    runner = StepRunner(_RunsOutOfMemory(limit=10), micro_batch_tokens=4000, layout="packed", device=CPU)
    step = StepDataset(StoreRows(tiny_store(4, min_length=30)), batch_size=4, seed=0)[0]
    with pytest.raises(RunFailed, match=r"single row of \d+ tokens") as error:
        runner.run(ForwardModel(tiny_model()), step, backward=lambda loss: loss.backward())
    assert "data.max_length" in str(error.value)


def test_step_level_statistics_see_the_whole_step_before_any_gradient() -> None:
    seen: list[float] = []

    class CountsTokens(SftObjective):
        def statistics(self, model, micro_batches) -> dict[str, Ratio]:
            assert not torch.is_grad_enabled()
            count = torch.tensor(float(sum(batch.num_tokens for batch in micro_batches)))
            return {"tokens": Ratio(count, torch.tensor(1.0))}

        def loss(self, model, micro_batch, statistics) -> LossSum:
            seen.append(statistics["tokens"])
            return super().loss(model, micro_batch, statistics)

    store, model = tiny_store(16), tiny_model()
    step = StepDataset(StoreRows(store), batch_size=16, seed=0)[0]
    runner = StepRunner(CountsTokens(), micro_batch_tokens=100, layout="packed", device=CPU)
    runner.run(ForwardModel(model), step, backward=lambda loss: loss.backward())
    assert len(seen) > 2
    assert set(seen) == {float(store.lengths.sum())}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(head_dim=8, final_logit_softcapping=30.0),
        Cohere2Config(logit_scale=0.25),
        GraniteConfig(logits_scaling=8.0),
    ],
)
@pytest.mark.parametrize("head", ["apart", "the model's own logits"])
def test_capped_and_scaled_logits_are_trained_on_exactly(config: PreTrainedConfig, head: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, value in (sizes | {"num_key_value_heads": 2, "vocab_size": 61, "pad_token_id": 0}).items():
        setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    store = tiny_store(12)
    forward = ForwardModel(model)
    assert forward.head is not None
    if head != "apart":
        forward.head = None
    with torch.no_grad():
        expected = reference_loss(model, store).item()
    runner = StepRunner(SftObjective(), micro_batch_tokens=100, layout="packed", device=CPU)
    step = StepDataset(StoreRows(store), batch_size=12, seed=0)[0]
    assert runner.run(forward, step, backward=lambda loss: loss.backward()).loss == pytest.approx(expected, rel=1e-5)


def test_ranks_share_every_row_of_a_step_once_and_evenly() -> None:
    lengths = np.random.default_rng(0).integers(3, 2000, 64).tolist()
    indexes = list(range(100, 164))
    shares = [share(indexes, lengths, rank, 4) for rank in range(4)]
    assert sorted(index for part in shares for index in part) == indexes
    loads = [sum(lengths[index - 100] for index in part) for part in shares]
    assert max(loads) - min(loads) < 0.02 * sum(loads)
