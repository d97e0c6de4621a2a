"""Settings that cannot stand together, found before a model loads.

Only what cannot work, and what would otherwise be silently without effect. Odd but possible values (a high learning
rate) are the user's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_sdk.spec.adapter import PEFT_PREFIXES, adapters_beside
from gym_sdk.spec.method import find_method_conflicts
from gym_sdk.spec.performance import why_not_in_backward, why_not_offloaded
from gym_sdk.spec.training_free import find_training_free_conflicts

if TYPE_CHECKING:
    from gym_sdk.spec._base import SpecModel
    from gym_sdk.spec.run import RunSpec

Conflict = tuple[str, str]
"""The path of the field to change, and why."""


def find_conflicts(spec: RunSpec) -> list[Conflict]:
    """Each conflict of a specification whose fields are valid by themselves."""
    return [
        *_weights(spec),
        *_beside(spec),
        *_training(spec),
        *_rows(spec),
        *_unread(spec),
        *_hardware(spec),
        *find_method_conflicts(spec),
        *find_training_free_conflicts(spec),
    ]


def _weights(spec: RunSpec) -> list[Conflict]:
    found: list[Conflict] = []
    model, adapter = spec.model, spec.adapter
    quantized = model.quantization != "none"
    if adapter.kind in ("full", "freeze"):
        if quantized:
            found.append(
                (
                    "model.quantization",
                    f"{model.quantization} weights are frozen, and adapter kind {adapter.kind} trains them",
                )
            )
        if spec.output.merge:
            found.append(
                ("output.merge", f"adapter kind {adapter.kind} has no adapter to merge; the result is a whole model")
            )
    if adapter.kind != "full" and adapter.kind != "freeze" and not adapter.targets:
        found.append(("adapter.targets", "names no module; leave it out for all linear layers"))
    if adapter.kind == "lora":
        if adapter.init == "loftq" and model.quantization != "nf4":
            found.append(("adapter.init", "loftq makes up for quantization to nf4; set model.quantization to nf4"))
        if quantized and adapter.init == "pissa":
            found.append(
                (
                    "adapter.init",
                    f"pissa decomposes weights in full precision, and model.quantization is {model.quantization}",
                )
            )
        if adapter.experts == "adapt":
            given = [
                name
                for name, is_given in (
                    ("init", adapter.init != "default"),
                    ("dora", adapter.dora),
                    ("dropout", adapter.dropout > 0),
                )
                if is_given
            ]
            found += [
                (f"adapter.{name}", "does not work on fused experts, and adapter.experts is adapt") for name in given
            ]
        if adapter.init_from is not None and adapter.init != "default":
            found.append(("adapter.init", f"{adapter.init} has no effect on an adapter that starts from init_from"))
    if model.revision is not None and (model.source.startswith("package:") or model.source.endswith(".gguf")):
        found.append(("model.revision", "only hub models have revisions, and model.source is a file"))
    return found


def _beside(spec: RunSpec) -> list[Conflict]:
    found: list[Conflict] = []
    others = adapters_beside(spec.adapter)
    seen = {"default": "the trained adapter's"}
    prefix = PEFT_PREFIXES.get(spec.adapter.kind, "")
    for index, other in enumerate(others):
        path = f"adapter.beside[{index}].name"
        if other.name in seen:
            found.append((path, f"{other.name} is {seen[other.name]} name; give each adapter its own"))
        elif other.name in prefix:
            found.append((path, f"peft takes {other.name} for a part of its own names ({prefix}...); use a longer one"))
        seen[other.name] = f"also adapter.beside[{index}]'s"
    init = getattr(spec.adapter, "init", "default")
    if others and init in ("pissa", "olora"):
        found.append(("adapter.init", f"{init} changes the weights that the adapters of adapter.beside were made for"))
    reference = getattr(spec.method, "reference_adapter", None)
    if reference is not None and reference not in {other.name for other in others}:
        known = ", ".join(other.name for other in others) or "it is empty"
        found.append(("method.reference_adapter", f"adapter.beside has no {reference} ({known})"))
    return found


def _training(spec: RunSpec) -> list[Conflict]:
    found: list[Conflict] = []
    train = spec.train
    if train.optimizer.startswith("schedule_free") and train.schedule != "constant":
        found.append(("train.schedule", f"{train.optimizer} replaces the schedule; set train.schedule to constant"))
    if train.optimizer in ("galore_adamw", "apollo_adamw") and spec.adapter.kind != "full":
        found.append(
            ("train.optimizer", f"{train.optimizer} projects the gradients of whole weights: adapter.kind=full")
        )
    if spec.adapter.kind == "lora" and spec.adapter.lora_plus_factor is not None and train.optimizer == "muon":
        found.append(("adapter.lora_plus_factor", "muon scales every update by its matrix; LoRA+ has no meaning there"))
    for name, is_given in (
        ("early_stopping_patience", train.early_stopping_patience is not None),
        ("keep", train.keep == "best"),
    ):
        if is_given and train.eval_every_steps is None:
            found.append((f"train.{name}", "needs evaluations on the way: set train.eval_every_steps and data.eval"))
    return found


def _rows(spec: RunSpec) -> list[Conflict]:
    found: list[Conflict] = []
    evaluation = spec.data.eval
    if evaluation.split is not None and evaluation.sources:
        found.append(("data.eval.split", "give a share of the training rows or sources of their own, not both"))
    found += [*_streaming(spec), *_wrapped(spec)]
    if spec.train.eval_every_steps is not None and evaluation.split is None and not evaluation.sources:
        found.append(
            ("train.eval_every_steps", "there are no evaluation rows; set data.eval.split or data.eval.sources")
        )
    return found


_STREAMING = ("sft", "pretrain", "orpo", "simpo", "cpo")
"""Methods that need nothing of a row before its step."""


def _streaming(spec: RunSpec) -> list[Conflict]:
    if not spec.data.streaming:
        return []
    found: list[Conflict] = []
    if spec.train.max_steps is None:
        found.append(("train.max_steps", "data.streaming does not know how many rows there are; say when to stop"))
    if spec.method.kind not in _STREAMING:
        found.append(("data.streaming", f"{spec.method.kind} looks at all rows before it begins"))
    if spec.data.eval.split is not None:
        found.append(
            ("data.eval.split", "a share of rows that are not read yet cannot be held out; use data.eval.sources")
        )
    return found


def _wrapped(spec: RunSpec) -> list[Conflict]:
    found: list[Conflict] = []
    train, data = spec.train, spec.data
    if data.packing_strategy == "wrapped":
        if not data.packing:
            found.append(("data.packing", "packing_strategy wrapped packs rows, and packing is false"))
        if spec.method.kind not in ("sft", "pretrain"):
            found.append(("data.packing_strategy", f"wrapped is for plain text, not for {spec.method.kind}"))
    if train.batch_tokens is not None:
        if data.packing_strategy != "wrapped":
            found.append(("train.batch_tokens", "only rows of data.packing_strategy: wrapped all have one length"))
        elif train.batch_tokens % data.max_length:
            found.append(("train.batch_tokens", f"must be a multiple of data.max_length, {data.max_length}"))
    return found


def _unread(spec: RunSpec) -> list[Conflict]:
    """Settings that are given, and that nothing reads because of another one."""
    found: list[Conflict] = []
    train, data = spec.train, spec.data
    if _is_given(data, "shuffle_buffer_rows") and not data.streaming:
        found.append(("data.shuffle_buffer_rows", "has no effect without data.streaming: all rows are shuffled"))
    if _is_given(train, "decay_ratio") and train.schedule != "wsd":
        found.append(("train.decay_ratio", f"has no effect on the schedule {train.schedule}, only on wsd"))
    if _is_given(train, "batch_size") and train.batch_tokens is not None:
        found.append(("train.batch_size", "train.batch_tokens stands in its place; give one of them"))
    for index, source in enumerate([*data.train, *data.eval.sources]):
        if source.revision is not None and not source.source.startswith("hub:"):
            place = f"train[{index}]" if index < len(data.train) else f"eval.sources[{index - len(data.train)}]"
            found.append((f"data.{place}.revision", "only data sets of the hub have revisions (hub:owner/name)"))
    return found


def _is_given(section: SpecModel, name: str) -> bool:
    """Whether a setting differs from its default: what else a file says is gone by now."""
    return getattr(section, name) != type(section).model_fields[name].default


def _hardware(spec: RunSpec) -> list[Conflict]:
    found: list[Conflict] = []
    if spec.performance.device == "cpu" and spec.performance.attention == "varlen":
        found.append(("performance.attention", "varlen needs a CUDA device, and performance.device is cpu"))
    for name, why_not in (
        ("optimizer_in_backward", why_not_in_backward(spec)),
        ("offload_optimizer", why_not_offloaded(spec)),
    ):
        if getattr(spec.performance, name) == "on" and why_not is not None:
            found.append((f"performance.{name}", why_not))
    return found
