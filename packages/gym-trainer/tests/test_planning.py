"""Guards: memory and work are what the real code would hold and do; the choice fits, and a refusal says what would."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, Qwen3Config

from gym_sdk.errors import DoesNotFit, UserError
from gym_sdk.spec import RunSpec
from gym_trainer.adapters import attach
from gym_trainer.cli.plan import parse_price
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.attention import PER_DOCUMENT, attention_of
from gym_trainer.planning import DEVICES, DataShape, Plan, by_name, plan, render
from gym_trainer.planning.estimate import Estimator, Simulations
from gym_trainer.planning.hardware import GIB
from gym_trainer.planning.simulate import Simulator
from gym_trainer.planning.source import teacher_bytes
from gym_trainer.planning.workload import MicroBatchShape, layer_pattern, meta_model, shortened

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def _spec(**sections):
    return RunSpec.model_validate({"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}} | sections)


def _estimator(spec, config, dtype=torch.float32):
    return Estimator(spec=spec, hardware=DEVICES["h200"], simulations=Simulations(spec, config, dtype, FastPath(), 32))


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(num_hidden_layers=7, **SMALL), Gemma2Config(num_hidden_layers=6, **SMALL)],
    ids=["equal layers", "alternating layers"],
)
def test_a_short_model_stands_for_the_whole(config):
    spec = _spec()
    estimator = _estimator(spec, config)
    estimate = estimator.micro_batch(64)
    whole = attach(meta_model(config, torch.float32), spec.adapter, seed=0).model.train()
    for recompute in (0, 2, config.num_hidden_layers):
        trace = estimator.simulations.trace(whole, MicroBatchShape.of(64, 32), recompute)
        memory = estimate.memory.peak(config.num_hidden_layers, recompute)
        assert memory == pytest.approx(trace.peak_bytes, rel=0.02)
        assert estimate.work(recompute).flops == pytest.approx(trace.flops, rel=1e-6)
    weights = sum(p.numel() for p in whole.parameters())
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    assert estimator.num_weights() == (weights, trained)


def test_simulated_activations_are_those_that_autograd_saves():
    config = LlamaConfig(num_hidden_layers=2, **SMALL)
    lengths = (20, 12)
    inputs = MicroBatchShape(lengths=lengths).model_inputs()
    simulated = meta_model(config, torch.float32)
    with Simulator() as simulator:
        hidden = simulated.model(**inputs).last_hidden_state
        simulator.mark("forward")
    del hidden

    real = LlamaForCausalLM(config)
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in real.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
        return tensor

    inputs |= {"input_ids": torch.zeros(1, 32, dtype=torch.long), "position_ids": torch.arange(32)[None]}
    with attention_of(real, PER_DOCUMENT), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = real.model(**inputs).last_hidden_state
    del kept
    # the real attention repeats keys and values for grouped queries and keeps slices; both are small beside the rest
    assert simulator.trace.marks["forward"] == pytest.approx(sum(saved.values()), rel=0.15)


def test_layer_pattern_and_shortening():
    config = Gemma2Config(num_hidden_layers=6, **SMALL)
    assert layer_pattern(config) == 2
    assert shortened(config, 2).layer_types == config.layer_types[:2]
    assert config.num_hidden_layers == 6
    assert layer_pattern(LlamaConfig(num_hidden_layers=7, **SMALL)) == 1


def test_one_long_row_is_planned_near_what_an_h200_measured():
    spec = _spec(data={"train": [{"source": "d"}], "max_length": 131_072}, train={"batch_size": 1})
    config = Qwen3Config(**(QWEN3_8B.to_dict() | {"max_position_embeddings": 131_072}))
    data = DataShape(num_rows=1, num_tokens=131_072, longest_row_tokens=131_072)
    result = plan(spec, config, DEVICES["h200"].limited_to(141 * 10**9), data=data, compare=False)
    assert result.memory.allocated / 2**30 == pytest.approx(118.50, rel=0.05)
    assert result.speed.throughput_tokens_per_s == pytest.approx(2663, rel=0.2)


def test_a_step_is_not_cut_into_a_micro_batch_and_a_small_rest():
    """12,096 tokens at once are as fast a token as 16,384, but leave a rest whose launches take as long."""
    data = DataShape(num_rows=32, num_tokens=13_488, longest_row_tokens=756)
    spec = _spec(method={"kind": "dpo"}, train={"batch_size": 32})
    assert plan(spec, QWEN3_8B, DEVICES["h200"], data=data, compare=False).micro_batch_tokens >= 13_488


def test_a_reference_in_the_step_costs_a_forward_pass():
    data = DataShape(num_rows=32, num_tokens=13_488, longest_row_tokens=756)
    times = {}
    for method in ({"kind": "dpo", "reference": "precomputed"}, {"kind": "dpo"}, {"kind": "kto"}):
        spec = _spec(method=method, train={"batch_size": 32})
        speed = plan(spec, QWEN3_8B, DEVICES["h200"], data=data, compare=False).speed
        times[len(times)] = 1 / speed.throughput_tokens_per_s
    forward = times[1] - times[0]
    assert 0.4 * times[0] < forward < 0.65 * times[0]  # of 4 N flops, 2 N, and the head's gradient with it
    assert times[2] - times[0] == pytest.approx(3 * forward, rel=0.05)  # KTO's mismatched answers: two passes more


def test_shared_prompts_are_planned_as_the_positions_that_are_left_and_what_gathers_their_keys():
    spec = _spec(method={"kind": "dpo", "reference": "precomputed"}, train={"batch_size": 32})
    data = DataShape(num_rows=32, num_tokens=16_000, longest_row_tokens=500)
    shared = dataclasses.replace(data, shared_tokens=4_000)
    plans = [plan(spec, QWEN3_8B, DEVICES["h200"], data=shape, compare=False) for shape in (data, shared)]
    assert [p.shared_prompts for p in plans] == [False, True]
    assert next(part for part in plans[1].parts if part.name == "shared prompts").state == "on"
    without, once = (p.speed.throughput_tokens_per_s for p in plans)
    assert 1.2 * without < once < 4 / 3 * without
    assert plans[1].speed.flops_per_token == pytest.approx(0.75 * plans[0].speed.flops_per_token, rel=0.02)
    assert plans[1].run.num_tokens == plans[0].run.num_tokens
    few = dataclasses.replace(data, shared_tokens=600)
    assert not plan(spec, QWEN3_8B, DEVICES["h200"], data=few, compare=False).shared_prompts

    shapes = (MicroBatchShape(lengths=(300, 200)), MicroBatchShape.of(500, 300, 100))
    assert shapes[1].lengths == (300, 200)
    config = LlamaConfig(num_hidden_layers=2, **SMALL)
    simulations = Simulations(_spec(), config, torch.bfloat16, FastPath(), 300)
    whole = attach(meta_model(config, torch.bfloat16), _spec().adapter, seed=0).model.train()
    plain, gathering = (simulations.trace(whole, shape, 0) for shape in shapes)
    # keys and values, in two layers, of 100 tokens more, two heads of 16, in two bytes
    kept = gathering.marks["forward"] - plain.marks["forward"]
    assert kept == pytest.approx(2 * 2 * 100 * 2 * 16 * 2, rel=0.1)


def test_a_pair_that_is_no_pair_shares_nothing():
    part = next(part for part in plan(_spec(), QWEN3_8B, DEVICES["h200"]).parts if part.name == "shared prompts")
    assert part.state == "not applicable"


def test_lora_of_8b_costs_four_flops_a_weight_and_attention():
    result = plan(_spec(), QWEN3_8B, DEVICES["h200"], compare=False)
    assert result.num_weights - result.num_trained == 8_190_735_360
    weights = 36 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288) + 151936 * 4096
    lora = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    attention = 36 * 3.5 * 4 * 32 * 128 * (2048 + 1) / 2
    first_layer_input = 2 * 4096 * (4096 + 2 * 1024)  # its gradient is not needed
    expected = 4 * weights + 6 * lora + attention - first_layer_input
    assert result.speed.flops_per_token == pytest.approx(expected, rel=2e-3)
    assert result.recompute_layers == 0
    assert result.attention == "gym_varlen"


def test_less_memory_recomputes_more_layers_and_never_exceeds_the_limit():
    needed = []
    for limit_gb in (141, 80, 40, 24):
        result = plan(_spec(performance={"memory_limit_gb": limit_gb}), QWEN3_8B, DEVICES["h200"], compare=False)
        assert result.memory.total <= limit_gb * 1e9
        needed.append(result.recompute_layers)
    assert needed == sorted(needed)
    assert needed[0] == 0 < needed[-1]


def test_a_refusal_names_what_would_fit():
    with pytest.raises(DoesNotFit) as refused:
        plan(_spec(), QWEN3_8B, DEVICES["rtx-3060"])
    assert refused.value.exit_code == 2
    assert "rtx-3060 has 11.8 GiB" in str(refused.value)
    assert "model.quantization=nf4 would fit" in str(refused.value)

    full = _spec(adapter={"kind": "full"})
    with pytest.raises(DoesNotFit, match=r"adapter.kind=lora would fit"):
        plan(full, QWEN3_8B, DEVICES["rtx-4090"])


def test_nf4_holds_linear_weights_in_half_a_byte():
    result = plan(_spec(model={"source": "m", "quantization": "nf4"}), QWEN3_8B, DEVICES["rtx-4090"], compare=False)
    linear = 36 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288)
    rest = 8_190_735_360 - linear
    assert result.memory.weights == pytest.approx(linear * 0.5159 + rest * 2 + result.num_trained * 4, rel=0.001)


def test_a_card_without_bfloat16_is_planned_in_float16_and_without_flash_kernels():
    config = LlamaConfig(num_hidden_layers=4, **SMALL)
    result = plan(_spec(), config, DEVICES["t4"], compare=False)
    assert (result.dtype, result.attention) == ("float16", PER_DOCUMENT)
    states = {part.name: (part.state, part.why) for part in result.parts}
    assert states["variable-length attention kernel"][0] == "off"
    assert "8.0" in states["variable-length attention kernel"][1]
    with pytest.raises(UserError, match="does not compute in bfloat16"):
        plan(_spec(model={"source": "m", "dtype": "bfloat16"}), config, DEVICES["t4"])


def test_the_data_gives_steps_time_and_cost():
    config = LlamaConfig(num_hidden_layers=4, **SMALL)
    data = DataShape(num_rows=100, num_tokens=5_000, longest_row_tokens=120)
    result = plan(_spec(train={"epochs": 2.0}), config, DEVICES["l4"], data=data, price_per_hour=2.0)
    assert result.run is not None
    assert (result.run.num_steps, result.run.num_tokens) == (14, 10_000)
    assert result.run.cost == pytest.approx(2.0 * result.run.time_s / 3600)
    room = 1.25  # for steps longer than the mean
    assert 120 <= result.micro_batch_tokens <= 50 * 16 * room


def test_a_pair_may_be_twice_as_long_as_a_row_and_a_copy_of_the_reference_is_counted():
    config = LlamaConfig(num_hidden_layers=2, **SMALL)
    data = DataShape(num_rows=100, num_tokens=15_000, longest_row_tokens=240)
    lengths = {"data": {"train": [{"source": "d"}], "max_length": 128}}
    alone = plan(_spec(**lengths), config, DEVICES["l4"], data=data)
    pairs = plan(_spec(method={"kind": "dpo"}, **lengths), config, DEVICES["l4"], data=data)
    assert pairs.micro_batch_tokens >= 240
    assert alone.memory.weights == pairs.memory.weights
    copied = plan(
        _spec(method={"kind": "dpo", "reference": "frozen_copy"}, **lengths), config, DEVICES["l4"], data=data
    )
    assert copied.memory.weights - pairs.memory.weights == 4 * copied.num_trained


def test_a_teacher_is_charged_and_every_suggestion_leaves_room_for_it(tmp_path):
    teacher = LlamaConfig(num_hidden_layers=2, **SMALL)
    LlamaForCausalLM(teacher).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    short = {"train": [{"source": "d"}], "max_length": 128}
    spec = _spec(method={"kind": "distillation", "teacher": str(tmp_path)}, data=short)
    weights = sum(p.numel() for p in meta_model(teacher, torch.float32).parameters())
    resident_bytes = teacher_bytes(spec)
    assert resident_bytes("bfloat16") == 2 * weights
    config = LlamaConfig(num_hidden_layers=4, **SMALL)
    alone = plan(spec, config, DEVICES["l4"], compare=False)
    beside = plan(spec, config, DEVICES["l4"], resident_bytes=resident_bytes, compare=False)
    assert beside.memory.method == 2 * weights
    assert beside.memory.allocated == alone.memory.allocated + 2 * weights
    assert "teacher" in render(beside)
    with pytest.raises(DoesNotFit, match=r"teacher 30\.0") as refused:
        plan(spec, config, DEVICES["l4"], resident_bytes=lambda dtype: 30 << 30)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("it would fit on a card of")


def test_what_fits_nowhere_is_refused_without_a_search_that_searches():
    config = LlamaConfig(num_hidden_layers=4, **SMALL)
    short = {"train": [{"source": "d"}], "max_length": 128}
    with pytest.raises(DoesNotFit, match=r"teacher 1024\.0") as refused:
        plan(_spec(data=short), config, DEVICES["l4"], resident_bytes=lambda dtype: 1 << 40)
    assert refused.value.hint == "use a smaller model"


def test_the_plan_survives_json_and_reads_well():
    config = LlamaConfig(num_hidden_layers=4, **SMALL)
    result = plan(_spec(), config, DEVICES["rtx-4090"])
    assert Plan.from_json(result.to_json()) == result
    text = render(result)
    for name in ("weights", "activations", "tokens/s", "packing", "recomputation", "rtx-4090"):
        assert name in text
    assert {part.state for part in result.parts} <= {"on", "off", "not applicable"}


def test_this_processor_is_measured_and_planned_in_float32():
    cpu = by_name("cpu")
    assert cpu.matmul_flops_per_s["float32"] > 1e8
    assert cpu.bandwidth_bytes_per_s > 1e8
    result = plan(_spec(), LlamaConfig(num_hidden_layers=4, **SMALL), cpu)
    assert (result.device, result.dtype, result.attention) == ("cpu", "float32", PER_DOCUMENT)
    assert result.memory.overhead > 100 * 2**20


def test_an_unknown_card_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean rtx-4090"):
        by_name("RTX 4091")


@pytest.mark.parametrize(("text", "price"), [("2.5/h", 2.5), ("$0.35/h", 0.35), ("3", 3.0), (None, None)])
def test_prices(text, price):
    assert parse_price(text) == price


def test_a_price_that_is_none_is_refused():
    with pytest.raises(UserError, match="price"):
        parse_price("cheap")


def test_recomputation_changes_nothing_but_memory_and_leaves_no_trace():
    config = LlamaConfig(num_hidden_layers=3, attention_dropout=0.0, **SMALL)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 128, (1, 24))

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with applied(model, FastPath(recompute_layers=2)):
        assert all("forward" in layer.__dict__ for layer in model.model.layers[:2])
        for got, want in zip(gradients(), expected, strict=True):
            assert torch.equal(got, want)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    with pytest.raises(ValueError, match="3 decoder layers"), applied(model, FastPath(recompute_layers=4)):
        pass


FULL_8B = {"adapter": {"kind": "full"}, "data": {"train": [{"source": "d"}], "max_length": 2048}}
STEP_OF_8192 = DataShape(num_rows=40, num_tokens=81_920, longest_row_tokens=2048, longest_step_tokens=8192)


def _full_8b(limit_gb: float, host_gib: int | None = 120, performance: dict | None = None, **train) -> Plan:
    card = dataclasses.replace(DEVICES["h200"], host_memory_bytes=None if host_gib is None else host_gib * GIB)
    spec = _spec(**FULL_8B, train={"batch_size": 4} | train, performance=performance or {})
    return plan(spec, QWEN3_8B, card.limited_to(int(limit_gb * 1e9)), data=STEP_OF_8192, compare=False)


def test_full_training_without_room_for_gradients_moves_weights_in_the_backward_pass():
    plain = _full_8b(141, max_grad_norm=None)
    assert not plain.optimizer_in_backward
    assert not plain.offload_optimizer
    fused = _full_8b(66, performance={"offload_optimizer": "off"}, max_grad_norm=None)
    assert fused.optimizer_in_backward
    assert not fused.offload_optimizer
    assert fused.memory.gradients == 0
    assert fused.micro_batch_tokens == 8192  # the whole step: gradients of two micro-batches would have to wait
    assert fused.memory.optimizer == pytest.approx(2 * plain.memory.weights, rel=1e-6)
    tight = _full_8b(40, max_grad_norm=None)
    assert tight.optimizer_in_backward
    assert tight.offload_optimizer
    assert tight.memory.optimizer_in_host == fused.memory.optimizer
    assert tight.memory.optimizer < tight.memory.optimizer_in_host / 8
    assert tight.speed.throughput_tokens_per_s < plain.speed.throughput_tokens_per_s
    assert "in the backward pass, states in host memory" in render(tight)


def test_states_that_host_memory_cannot_hold_are_not_put_there():
    with pytest.raises(DoesNotFit):
        _full_8b(40, host_gib=24, max_grad_norm=None)
    reasons = {part.name: part for part in _full_8b(66, host_gib=24, max_grad_norm=None).parts}
    assert reasons["optimizer states in host memory"].why == (
        "states of 30.5 GiB, and 24.0 GiB of host memory are free"
    )


def test_clipping_keeps_weights_from_moving_early_and_the_hint_says_so():
    parts = {part.name: part for part in _full_8b(141).parts}
    assert "clipping needs every gradient" in parts["optimizer in the backward pass"].why
    with pytest.raises(DoesNotFit) as error:
        _full_8b(50, performance={"offload_optimizer": "off"})
    assert error.value.hint is not None
    assert error.value.hint.startswith("train.max_grad_norm=null with train.optimizer=adamw_8bit would fit")


def test_what_was_asked_for_and_cannot_be_had_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"offload_optimizer is on: states of 30\.5 GiB") as error:
        _full_8b(141, host_gib=24, performance={"offload_optimizer": "on"})
    assert error.value.hint == "set performance.offload_optimizer=auto"
