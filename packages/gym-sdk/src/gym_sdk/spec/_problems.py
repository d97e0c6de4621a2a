"""Pydantic's findings, said in the words of the specification."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from gym_sdk.errors import Problem, Where
from gym_sdk.spec._document import Document, Path, format_path, parse_path, parse_scalar
from gym_sdk.spec._fields import Shape, all_fields, field_shape, format_value
from gym_sdk.spec._overrides import COMMAND_LINE

CONFLICT = "conflict"
TRAINING_FREE = "training_free_grpo"

LARGEST = 2**63 - 1
"""What 64 bits hold; larger whole numbers are lost or refused further on."""

UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""U+0000 ends file names; half a surrogate pair is how Python shows a byte that is not UTF-8."""

OTHER_NAMES = {
    "lr": "train.learning_rate",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "micro_batch_size": "train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.batch_size",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "save_steps": "train.checkpoint_every_steps",
    "eval_steps": "train.eval_every_steps",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.targets",
    "target_modules": "adapter.targets",
    "use_dora": "adapter.dora",
    "base_model": "model.source",
    "model_name_or_path": "model.source",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "sample_packing": "data.packing",
    "val_size": "data.eval.split",
    "val_set_size": "data.eval.split",
    "output_dir": "output.dir",
}
"""What other tools call a field. People arrive with these in their fingers."""

MAIN_KEYS = ("source", "split")
"""What a person means who gives a plain value where a section stands."""

OTHER_VALUES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "4bit": "nf4",
    "8bit": "int8",
    "qlora": "lora",
}
"""What other tools call a choice."""


class Reporter:
    """Turns one ValidationError into problems, each with its place."""

    def __init__(self, document: Document, root: Shape, name: str, touched: Iterable[Path] = ()) -> None:
        self.document, self.root, self.name = document, root, name
        self.touched = set(touched)

    def problems(self, error: ValidationError) -> tuple[Problem, ...]:
        found: dict[Path, Problem] = {}
        for each in error.errors(include_url=False):
            if each["type"] == CONFLICT:
                for text, message in each.get("ctx", {})["conflicts"]:
                    path = parse_path(text)
                    found.setdefault(path, self.problem(path, message))
                continue
            path, shape, missing_from = self.locate(each["loc"])
            found.setdefault(path, self.explain(each, path, shape, missing_from))
        in_file = sorted(found.items(), key=lambda item: self.document.line(item[0]) or 0)
        return tuple(problem for _, problem in in_file)

    def unusable_values(self) -> tuple[Problem, ...]:
        """Texts that no file name and no saved specification can hold, and numbers beyond 64 bits."""

        def walk(value: Any, path: Path) -> Iterable[Problem]:
            if isinstance(value, dict):
                for key, inner in value.items():
                    yield from walk(inner, (*path, key))
            elif isinstance(value, list):
                for index, inner in enumerate(value):
                    yield from walk(inner, (*path, index))
            elif isinstance(value, int) and abs(value) > LARGEST:
                yield self.problem(path, f"a number beyond {LARGEST}; got {format_value(value)}")
            elif isinstance(value, str) and (bad := UNWRITABLE.search(value)):
                message = f"holds the character U+{ord(bad[0]):04X}, which no UTF-8 file or file name can have"
                yield self.problem(path, f"{message}; got {json.dumps(value[:60])}")

        return tuple(walk(self.document.data, ()))

    def locate(self, location: tuple[str | int, ...]) -> tuple[Path, Shape | None, Shape]:
        """The user's path of pydantic's location, its shape (None when there is no such field), and its owner's.

        Pydantic names the branch of a union it was in (a kind, `literal['auto']`); the user never wrote that.
        """
        path: Path = ()
        shape: Shape | None = self.root
        owner = self.root
        for part in location:
            assert shape is not None
            if isinstance(part, int):
                if shape.items is None:
                    break
                path, owner, shape = (*path, part), shape, shape.items
            elif part in shape.kinds and len(shape.models) > 1:
                shape = Shape(models=(shape.kinds[part],))
            elif shape.models:
                info = next((m.model_fields[part] for m in shape.models if part in m.model_fields), None)
                path, owner, shape = (*path, part), shape, field_shape(info) if info else None
            elif shape.values is not None:
                path, owner, shape = (*path, part), shape, shape.values
            else:
                break
            if shape is None:
                break
        return path, shape, owner

    def explain(self, error: Any, path: Path, shape: Shape | None, owner: Shape) -> Problem:
        if shape is None:
            return self.unknown_key(path, owner)
        value, given = self.value(path)
        if error["type"] == "missing" and path == ("model",) and self.value(("method", "kind"))[0] == TRAINING_FREE:
            return self.problem(("method", "student", "model"), "required: the name that the endpoint knows it by")
        if error["type"] == "missing":
            return self.problem(path, f"required: {shape.describe()}")
        if error["type"].startswith("union_tag"):
            kind = value.get("kind") if isinstance(value, dict) else None
            if kind is None:
                return self.problem((*path, "kind"), f"required: one of {', '.join(shape.kinds)}")
            return self.problem(
                (*path, "kind"),
                f"must be one of {', '.join(shape.kinds)}; got {format_value(kind)}{_did_you_mean(kind, shape.kinds)}",
            )
        if error["type"] in ("value_error", "assertion_error"):
            return self.problem(path, str(error["msg"]).removeprefix("Value error, "))
        if path == ("spec_version",) and isinstance(value, int) and value > 1:
            return self.problem(
                path,
                f"written for version {value} of the specification, and this gym reads up to 1",
                hint="upgrade gym-sdk",
            )
        shown = format_value(value) if given else "nothing"
        if isinstance(value, float) and shown.lstrip("-").isdigit():
            shown += ".0"  # what is wrong with it is the point
        message = f"must be {shape.describe()}; got {shown}"
        return self.problem(path, message + _slip(value, shape))

    def unknown_key(self, path: Path, owner: Shape) -> Problem:
        key, parent = str(path[-1]), format_path(path[:-1])
        model = owner.models[0]
        section = f" of adapter kind {model.model_fields['kind'].default}" if path[0] == "adapter" else ""
        if path[0] != "adapter" and "kind" in model.model_fields:
            section = f" of {parent} kind {model.model_fields['kind'].default}"
        known = list(model.model_fields)
        message = f"unknown key{section}"
        if key in OTHER_NAMES:
            return self.problem(path, f"{message}; it is called {OTHER_NAMES[key]} here")
        if near := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
            return self.problem(path, f"{message}; did you mean {near[0]}?")
        everywhere = list(all_fields(self.root.models[0]))
        same = [each for each in everywhere if each.name == key]
        of_other_kind = [each for each in same if each.path == format_path(path) and each.kind]
        if of_other_kind:
            kinds = ", ".join(str(each.kind) for each in of_other_kind)
            return self.problem(path, f"{message}; it belongs to kind {kinds}")
        if same:
            return self.problem(path, f"{message}; did you mean {same[0].path}?")
        if near := difflib.get_close_matches(key, [each.name for each in everywhere], n=1, cutoff=0.75):
            found = next(each for each in everywhere if each.name == near[0])
            return self.problem(path, f"{message}; did you mean {found.path}?")
        return self.problem(path, f"{message}; known keys are {', '.join(known)}")

    def value(self, path: Path) -> tuple[Any, bool]:
        data = self.document.data
        for part in path:
            try:
                data = data[part]
            except (KeyError, IndexError, TypeError):
                return None, False
        return data, True

    def problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        text = format_path(path) or None
        # A section that only overrides brought is theirs, also for what is missing from it.
        section = path[:-1] if path[:-1] not in self.document.lines else path
        if any(path[: len(each)] == each or (section and each[: len(section)] == section) for each in self.touched):
            return Problem(message=message, where=Where(file=COMMAND_LINE, path=text), hint=hint)
        return Problem(
            message=message, where=Where(file=self.name, line=self.document.line(path), path=text), hint=hint
        )


def _did_you_mean(text: Any, known: Iterable[Any]) -> str:
    names = [name for name in known if isinstance(name, str)]
    if not isinstance(text, str):
        return ""
    other = OTHER_VALUES.get(text.lower())
    near = [other] if other in names else difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _slip(value: Any, shape: Shape) -> str:
    """The likely slip of the pen behind a value of the wrong type."""
    types = [kind for kind, _ in shape.scalars]
    if int in types and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}" if abs(value) < 1e15 else ""
    if form := _section_for(value, shape):
        return f"; write {form}"
    if isinstance(value, str):
        if near := _did_you_mean(value, shape.choices):
            return near
        if {int, float} & set(types) and (number := _number(value)):
            return "; write it without quotes" if number == value else f"; write {number}"
        if bool in types and value.lower() in ("yes", "no", "on", "off", "y", "n"):
            return f"; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
        if shape.items is not None or (shape.models and shape.kinds):
            return f"; write {{kind: {value}}}" if value in shape.kinds else ""
    elif str in types and isinstance(value, int | float):
        return "; put it in quotes"
    elif isinstance(value, dict) and shape.items is not None and shape.items.models:
        return "; begin the item with a dash"
    return ""


def _number(text: str) -> str | None:
    """The number that a text means: itself without quotes, or without the underscores of Python."""
    plain = text.replace("_", "").strip()
    return plain if plain.isascii() and isinstance(parse_scalar(plain), int | float) else None


def _section_for(value: Any, shape: Shape) -> str | None:
    """`{source: rows.jsonl}` for `rows.jsonl`, where a section with one main key was wanted."""
    inner = shape.items if shape.items is not None and not shape.scalars else shape
    if isinstance(value, bool) or not isinstance(value, str | float) or len(inner.models) != 1 or inner.kinds:
        return None
    for name, info in inner.models[0].model_fields.items():
        scalars = [kind for kind, _ in field_shape(info).scalars]
        if name in MAIN_KEYS and (str if isinstance(value, str) else float) in scalars:
            text = f"{{{name}: {format_value(value, bare=True)}}}"
            return f"[{text}]" if shape.items is not None and not shape.models else text
    return None
