"""Guards the architecture matrix: distinct classes, one process each, kept results, and a handful of real rows."""

from __future__ import annotations

from pathlib import Path

import matrix_children
import pytest

from gym_trainer.cli.matrix import matrix
from gym_trainer.matrix import runner
from gym_trainer.matrix.architectures import Architecture, all_architectures
from gym_trainer.matrix.checks import CHECKS, Row, check_architecture
from gym_trainer.matrix.page import render
from gym_trainer.matrix.runner import run_matrix

QUICK = ["llama", "qwen3_moe", "gpt2", "mamba"]
"""A dense model, fused experts, transposed linear layers, and one that cannot keep documents apart and reads weights
without calling their layers."""


@pytest.fixture(scope="module")
def architectures() -> dict[str, Architecture]:
    return {architecture.model_type: architecture for architecture in all_architectures()}


def test_each_class_is_listed_once_under_its_own_name(architectures: dict[str, Architecture]) -> None:
    classes = [architecture.class_name for architecture in architectures.values()]
    assert len(classes) == len(set(classes))
    assert architectures["llama"].aliases == ("exaone", "internlm3", "iquestcoder") or architectures["llama"].aliases
    assert architectures["bart"].group == "encoder-decoder"
    assert architectures["bert"].group == "encoder"
    assert architectures["gemma3"].group == "multimodal"
    assert architectures["gemma3_text"].group == "decoder"
    decoders = [a for a in architectures.values() if a.group == "decoder"]
    assert len(decoders) >= 120


@pytest.mark.parametrize("model_type", QUICK)
def test_these_families_pass_everything_that_applies(model_type: str, architectures: dict[str, Architecture]) -> None:
    row = check_architecture(architectures[model_type])
    failed = {name: outcome.note for name, outcome in row.checks.items() if outcome.status == "fail"}
    assert failed == {}
    assert row.passed
    assert row.checks["packing"].status == ("unpacked" if model_type == "mamba" else "pass")
    assert row.checks["experts"].status == ("pass" if model_type == "qwen3_moe" else "not applicable")


def test_layers_that_share_one_weight_are_not_merged(architectures: dict[str, Architecture]) -> None:
    checks = check_architecture(architectures["zamba2"], only=("load", "packing", "lora", "reload", "merge")).checks
    assert checks["reload"].status == "pass"
    assert checks["merge"].status == "refused"
    assert "use one weight, and each has an update of its own" in checks["merge"].note


def test_a_crash_is_a_row_and_the_others_go_on(
    architectures: dict[str, Architecture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_child", matrix_children.die)
    rows = run_matrix([architectures["llama"], architectures["gpt2"]], tmp_path, timeout_s=60)
    assert [row.passed for row in rows] == [False, False]
    assert {outcome.note for outcome in rows[0].checks.values()} == {"the process was ended by SIGSEGV"}


def test_kept_results_are_used_and_failed_ones_are_made_again_when_asked(
    architectures: dict[str, Architecture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool]] = []

    def note(row: Row, is_new: bool) -> None:
        made.append((row.model_type, is_new))

    monkeypatch.setattr(runner, "run_child", matrix_children.pretend)
    chosen = [architectures["llama"], architectures["gpt2"]]
    run_matrix(chosen, tmp_path, on_row=note)
    run_matrix(chosen, tmp_path, on_row=note)
    run_matrix(chosen, tmp_path, on_row=note, again=lambda row: row.model_type == "gpt2")
    assert made == [
        *[("llama", True), ("gpt2", True)],
        *[("llama", False), ("gpt2", False)],
        *[("llama", False), ("gpt2", True)],
    ]


def test_the_page_counts_what_passed(architectures: dict[str, Architecture]) -> None:
    from gym_trainer.matrix.checks import Outcome

    def row(name: str, status: str) -> Row:
        architecture = architectures[name]
        note = "a | b </tmp/gym-matrix-x1/base/f>" if status == "fail" else ""
        outcome = Outcome(status=status, note=note)  # pyright: ignore[reportArgumentType]
        return Row(
            model_type=name,
            class_name=architecture.class_name,
            group=architecture.group,
            aliases=architecture.aliases,
            checks=dict.fromkeys(CHECKS, outcome),
        )

    page = render([row("llama", "pass"), row("gpt2", "fail"), row("bert", "pass")], {"transformers": "5"})
    assert "1 of 2 decoder classes tried pass" in page
    assert "a \\| b" in page
    assert "gym-matrix" not in page


@pytest.mark.matrix
def test_the_whole_matrix(tmp_path: Path) -> None:
    """Half an hour on two cores."""
    assert matrix(jobs=2, results=tmp_path / "results", page=tmp_path / "models.md") == 0
    head = (tmp_path / "models.md").read_text().split(" decoder classes tried pass")[0]
    passed = int(head.rpartition(". ")[2].split(" of ")[0])
    assert passed >= 120
