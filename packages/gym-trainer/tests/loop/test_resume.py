"""Guards resuming: killed at any moment, a run goes on to the same numbers, bit for bit on a processor."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import (
    final_weights,
    fit_and_die,
    fit_tiny,
    kill_after_step,
    kill_within_commit,
    last_step,
    logs,
    losses,
    optimizer_state,
    tiny_spec,
)

from gym_sdk.errors import RunFailed
from gym_trainer.loop import checkpoint
from gym_trainer.loop.interrupt import StopRequest

LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}
NUM_STEPS = 12


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run that nothing happened to, once for each kind."""
    made: dict[str, Path] = {}

    def make(adapter: dict[str, Any] = LORA, **options: Any) -> Path:
        key = repr((adapter, options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("uninterrupted")
            fit_tiny(made[key], tiny_spec(adapter=adapter), **options)
        return made[key]

    return make


def assert_same_run(run: Path, expected: Path) -> None:
    """Every loss, also of steps that were done twice, the final weights and the optimizer, bit for bit."""
    assert last_step(run) == NUM_STEPS
    expected_losses = losses(expected)
    assert set(expected_losses) == set(losses(run)) == set(range(1, NUM_STEPS + 1))
    for step, values in losses(run).items():
        assert set(values) == set(expected_losses[step]), f"step {step}"
    weights, expected_weights = final_weights(run), final_weights(expected)
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    states, expected_states = optimizer_state(run)["state"], optimizer_state(expected)["state"]
    for number, state in states.items():
        assert all(torch.equal(state[name], expected_states[number][name]) for name in state)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("adapter", [LORA, {"kind": "full"}, LORA | {"init": "pissa"}], ids=["lora", "full", "pissa"])
def test_killed_between_checkpoints_the_run_goes_on_to_the_same_numbers(
    tmp_path: Path, uninterrupted: Callable[..., Path], adapter: dict[str, Any], packed: bool
) -> None:
    spec = tiny_spec(adapter=adapter)
    assert fit_and_die(tmp_path, spec, kill_after_step(9), packed=packed) == -signal.SIGKILL
    assert checkpoint.newest(tmp_path / "checkpoints")[0].name == "checkpoint-8"
    assert fit_tiny(tmp_path, spec, resume=True, packed=packed).resumed_from == 8
    assert_same_run(tmp_path, uninterrupted(adapter, packed=packed))


def test_killed_before_the_first_checkpoint_the_run_starts_again(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    assert fit_and_die(tmp_path, tiny_spec(), kill_after_step(1)) == -signal.SIGKILL
    assert fit_tiny(tmp_path, tiny_spec(), resume=True).resumed_from is None
    assert_same_run(tmp_path, uninterrupted())


@pytest.mark.parametrize(
    ("moment", "resumes_from"),
    [
        ("before anything is flushed", 4),
        ("between two files", 4),
        ("before the rename", 4),
        ("after the rename", 6),
        ("within the deletion of an old one", 8),
    ],
)
def test_killed_while_a_checkpoint_is_written_it_is_complete_or_absent(
    tmp_path: Path, uninterrupted: Callable[..., Path], moment: str, resumes_from: int
) -> None:
    assert fit_and_die(tmp_path, tiny_spec(), kill_within_commit(moment)) == -signal.SIGKILL
    assert all(checkpoint.problem(path) is None for path in checkpoint.steps_on_disk(tmp_path / "checkpoints").values())
    assert fit_tiny(tmp_path, tiny_spec(), resume=True).resumed_from == resumes_from
    assert not list((tmp_path / "checkpoints").glob(f"{checkpoint.STAGING_NAME}*"))
    assert_same_run(tmp_path, uninterrupted())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: cut(folder / "optimizer.pt"), r"optimizer.pt has \d+ bytes instead of \d+"),
        (lambda folder: flip(folder / "adapter_model.safetensors"), "adapter_model.safetensors has other contents"),
        (lambda folder: (folder / "rng_state.pth").unlink(), "rng_state.pth is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: cut(folder / "manifest.json"), "manifest.json is unreadable"),
    ],
    ids=["cut", "flipped", "missing", "no manifest", "cut manifest"],
)
def test_a_torn_checkpoint_is_passed_over_by_name_and_the_one_before_is_used(
    tmp_path: Path, uninterrupted: Callable[..., Path], damage: Callable[[Path], None], reason: str
) -> None:
    assert fit_and_die(tmp_path, tiny_spec(), kill_after_step(9)) == -signal.SIGKILL
    damage(tmp_path / "checkpoints" / "checkpoint-8")
    assert fit_tiny(tmp_path, tiny_spec(), resume=True).resumed_from == 6
    (passed_over,) = [text for text in logs(tmp_path) if "passed over" in text]
    assert passed_over.startswith("checkpoint-8 is incomplete")
    import re

    assert re.search(reason, passed_over)
    assert_same_run(tmp_path, uninterrupted())


def test_asked_to_stop_the_run_pauses_with_a_checkpoint_of_the_step_it_was_in(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    stop = StopRequest()

    class StopsAtFive:
        def update(self, done: float, total: float | None = None) -> None:
            if done == 5:
                stop.request()

        def advance(self, amount: float = 1) -> None: ...

    result = fit_tiny(tmp_path, tiny_spec(), stop=stop, progress=StopsAtFive())
    assert result.paused
    assert last_step(tmp_path) == result.num_steps
    assert result.num_steps in (5, 6)
    assert fit_tiny(tmp_path, tiny_spec(), resume=True).num_steps == NUM_STEPS
    assert_same_run(tmp_path, uninterrupted())


def test_the_newest_checkpoints_and_no_more_stay_on_disk(uninterrupted: Callable[..., Path]) -> None:
    assert list(checkpoint.steps_on_disk(uninterrupted() / "checkpoints")) == [12, 10, 8]


@pytest.mark.parametrize("learning_rate", [1e6, 1e30])
def test_a_loss_that_is_not_finite_ends_the_run_with_the_step_its_rows_and_the_last_good_checkpoint(
    tmp_path: Path, learning_rate: float
) -> None:
    spec = tiny_spec(
        learning_rate=learning_rate, schedule="constant", checkpoint_every_steps=1, adapter={"kind": "full"}
    )
    with pytest.raises(RunFailed) as error:
        fit_tiny(tmp_path, spec)
    logged = losses(tmp_path)
    step = max(logged) + 1
    assert all(abs(values[0]) < float("inf") for values in logged.values())
    assert f"at step {step} (rows: row " in error.value.message
    assert f"the last good checkpoint is checkpoint-{step - 1}" in error.value.message
    assert checkpoint.newest(tmp_path / "checkpoints")[0].name == f"checkpoint-{step - 1}"
    assert all(torch.isfinite(weight).all() for weight in final_weights(tmp_path).values())
