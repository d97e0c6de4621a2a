"""The model card that lies with an artifact: what it is, how good it is, and how to use it. No path of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gym_sdk.cli.console import format_duration
from gym_sdk.rundir import RunDir
from gym_trainer.exporting.folder import METADATA_NAME
from gym_trainer.exporting.score import score_usage
from gym_trainer.records import read_json, write_text
from gym_trainer.report import words
from gym_trainer.report.markdown import evaluation_lines, table

_USE_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```"""

_USE_MODEL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```"""


_USE_GGUF = """```
llama-server -m {0} --jinja
```"""


def write_card(folder: Path, facts: dict[str, Any]) -> Path:
    """Write README.md into an artifact's folder."""
    path = folder / "README.md"
    scores = (read_json(folder / METADATA_NAME) or {}).get("scores")
    write_text(path, render_card(facts, is_adapter=(folder / "adapter_config.json").is_file(), scores=scores))
    return path


def write_card_file(path: Path, run: RunDir, *, gguf: str) -> Path:
    """The card of a GGUF file, beside it."""
    write_text(path, render_card(read_json(run.report_path("json")), is_adapter=False, gguf=gguf))
    return path


def render_card(
    facts: dict[str, Any], *, is_adapter: bool, gguf: str | None = None, scores: dict[str, Any] | None = None
) -> str:
    """The card as Markdown with the front matter that hubs read. `scores` is of a model that gives numbers."""
    spec = facts["spec"]
    source = without_path(spec["model"]["source"])
    head: dict[str, Any] = {
        "library_name": "gguf" if gguf else "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "tags": ["gym", spec["method"]["kind"], spec["adapter"]["kind"]],
    }
    if source.count("/") == 1 and source == spec["model"]["source"] and ":" not in source:
        head["base_model"] = source
    kind = "An adapter for" if is_adapter else "A model made from"
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {facts['run']['name']}", ""]
    lines += [f"{kind} `{source}`, trained by Gym with {spec['method']['kind']}.", ""]
    for task in facts["evaluation"]:
        lines += [*evaluation_lines(task), ""]
    lines += ["## Use", "", _usage(source, is_adapter=is_adapter, gguf=gguf, scores=scores), ""]
    lines += ["The chat template and the ids that end an answer are those of training.", ""]
    lines += ["## Training", "", *table(("", ""), words.run_rows(facts)), ""]
    if facts["training"]:
        training = facts["training"]
        measured = facts["plan"].get("measured") or {}
        took = f" It took {format_duration(measured['time_s'])} of computing." if measured.get("time_s") else ""
        if facts.get("cost") is not None:
            took += f" The whole run cost {facts['cost']:.2f}, at {spec['output']['price_per_hour']:g} an hour."
        lines += [
            f"{training['num_steps']} steps over {words.count(training['num_tokens'])} tokens; the loss went from "
            f"{words.number(training['first_loss'])} to {words.number(training['last_loss'])}.{took}",
            "",
        ]
    lines += ["## Data", "", *table(("", ""), words.data_rows(facts)), ""]
    lines += ["## Specification", "", "```yaml", yaml.safe_dump(_public(spec), sort_keys=False).strip(), "```", ""]
    return "\n".join(lines)


def _usage(source: str, *, is_adapter: bool, gguf: str | None, scores: dict[str, Any] | None) -> str:
    if gguf:
        return _USE_GGUF.format(gguf)
    if scores:
        return score_usage(scores, source, is_adapter=is_adapter)
    return _USE_ADAPTER if is_adapter else _USE_MODEL


def without_path(source: str) -> str:
    """A hub id or package file as it is; of a path on this machine only its last part."""
    return Path(source).name if source.startswith(("/", "~", ".")) or "\\" in source else source


def _public(value: Any) -> Any:
    """The specification with every path of this machine cut to its last part."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return without_path(value) if isinstance(value, str) else value
