"""The matrix as a page for people: docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gym_trainer.matrix.architectures import GROUPS
from gym_trainer.matrix.checks import CHECKS, Outcome, Row

_SIGNS = {"pass": "✓", "unpacked": "unpacked", "refused": "refused", "not applicable": "–", "fail": "✗"}
_TITLES = {
    "decoder": "Decoders",
    "encoder": "Encoders with a causal mask",
    "encoder-decoder": "Decoders of encoder-decoders",
    "multimodal": "Multimodal wrappers",
}
_HEAD = """# Models

<!-- Written by `gym matrix --page docs/models.md`; changes by hand are lost. -->

Every causal language model class of transformers {transformers}, tried with a tiny random model on a processor
(torch {torch}, peft {peft}, bitsandbytes {bitsandbytes}). {passed} of {total} decoder classes tried pass everything
that applies; {experts} of them are mixtures of experts whose experts learn. The command `gym matrix` repeats all of it.
{untried}
| column | what passed means |
| --- | --- |
| load | saved, loaded as a run loads it, twice to equal logits |
| packing | documents packed into one row have the logits that each has alone. *unpacked*: the architecture mixes \
neighbouring positions outside its attention, so Gym trains one document a row, which was compared instead; \
or each row alone, where padding changes its logits, too |
| lora | LoRA on all linear layers, and on the experts: five updates lower the loss, and the adapter beside every \
layer that the model computes gets a gradient |
| experts | every adapted expert weight gets a gradient. *refused*: no adapter of experts would be computed |
| reload | the saved adapter on a fresh base gives the trained logits (relative distance below 1e-4) |
| merge | the merged folder, loaded by plain transformers, gives them too. *refused*: layers that share one \
weight have an update each |
| full | an update of every weight lowers the loss and changes weights; every weight of experts gets a gradient |
| qlora | LoRA on a base in nf4 lowers the loss |

A dash: the step does not apply. Notes say why something did not pass.
"""


def render(rows: Sequence[Row], versions: dict[str, Any], *, untried: Sequence[str] = ()) -> str:
    """The page as Markdown. `untried` are model types without a result yet."""
    decoders = [row for row in rows if row.group == "decoder"]
    facts = {name: versions.get(name) or "not installed" for name in ("transformers", "torch", "peft", "bitsandbytes")}
    passed = [row for row in decoders if row.passed]
    experts = sum(_experts_learn(row) for row in passed)
    missing = f"\nNot tried yet with these versions: {', '.join(untried)}.\n" if untried else ""
    text = _HEAD.format(**facts, passed=len(passed), total=len(decoders), experts=experts, untried=missing)
    for group in GROUPS:
        if members := sorted((row for row in rows if row.group == group), key=lambda row: row.model_type):
            text += f"\n## {_TITLES[group]}\n\n{_table(members)}"
    return text


def summary(rows: Sequence[Row]) -> str:
    """A line for a terminal."""
    passed = [row for row in rows if row.passed]
    decoders = sum(row.group == "decoder" for row in passed)
    experts = sum(_experts_learn(row) for row in passed)
    return f"{len(passed)} of {len(rows)} pass everything that applies; {decoders} decoders; {experts} with experts"


def _experts_learn(row: Row) -> bool:
    return row.num_expert_weights > 0 and row.checks["experts"].status == "pass"


def line(row: Row) -> str:
    """One row for a terminal: what failed, if anything."""
    failed = [f"{name}: {outcome.note}" for name, outcome in row.checks.items() if outcome.status == "fail"]
    return f"{row.model_type}: {'; '.join(failed) or 'passes'}"


def _table(rows: Sequence[Row]) -> str:
    lines = [f"| model type | {' | '.join(CHECKS)} | notes |", f"| --- | {'--- | ' * len(CHECKS)}--- |"]
    for row in rows:
        name = f"{row.model_type} ({', '.join(row.aliases)})" if row.aliases else row.model_type
        signs = [_SIGNS[row.checks[check].status] for check in CHECKS]
        lines.append(f"| {name} | {' | '.join(signs)} | {_notes(row)} |")
    return "\n".join(lines) + "\n"


def _notes(row: Row) -> str:
    notes: dict[str, list[str]] = {}
    for name, outcome in row.checks.items():
        if _worth_saying(outcome):
            notes.setdefault(outcome.note, []).append(name)
    return "; ".join(f"{', '.join(names)}: {_plain(note)}" for note, names in notes.items())


def _worth_saying(outcome: Outcome) -> bool:
    return outcome.status in ("fail", "unpacked", "refused")


def _plain(note: str) -> str:
    """In a cell of a table, without the folder that only this trial had."""
    note = re.sub(r"\S*/gym-matrix-[^/\s]*/", "", note)
    return note.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
