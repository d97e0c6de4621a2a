"""An adapter that training goes on from: its own settings hold, and a specification that gives others is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError, Where
from gym_sdk.spec.adapter import Ia3Adapter, LoraAdapter, OftAdapter, VeraAdapter

if TYPE_CHECKING:
    from peft import PeftConfig

_NAMES = {
    "lora": {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "dora": "use_dora"},
    "oft": {"block_size": "oft_block_size", "dropout": "module_dropout"},
    "vera": {"rank": "r", "dropout": "vera_dropout"},
    "ia3": {},
}
"""peft's names of the settings, by kind."""
_HINT = "leave it out: an adapter that training goes on from keeps its own settings"


def require_same(
    config: PeftConfig,
    adapter: LoraAdapter | OftAdapter | VeraAdapter | Ia3Adapter,
    new_token_ids: tuple[int, ...] = (),
) -> None:
    """Compare what the specification gives, beyond the defaults, with the adapter that was loaded.

    Raises:
        ModelError: a setting that would have no effect, or new tokens whose rows the adapter does not train.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    if adapter.kind != kind and adapter.kind != "lora":  # lora is what stands there when no kind is given
        raise _differs("kind", adapter.kind, kind, adapter.init_from)
    for name, given in _given(adapter).items():
        held = _held(config, adapter.kind, name)
        if held != given:
            raise _differs(name, given, held, adapter.init_from)
    trained_rows = {row for rows in (getattr(config, "trainable_token_indices", None) or {}).values() for row in rows}
    if missing := sorted(set(new_token_ids) - trained_rows):
        raise ModelError(
            f"model.new_tokens: the adapter does not train the embedding of token {missing[0]}",
            where=Where(file=adapter.init_from),
            hint="start a new adapter, or leave out the new tokens",
        )


def _given(adapter: LoraAdapter | OftAdapter | VeraAdapter | Ia3Adapter) -> dict[str, Any]:
    """The settings that differ from their defaults and that an adapter's file holds."""
    names = [*_NAMES[adapter.kind], "targets", "modules_to_save", "scaling"]
    fields = type(adapter).model_fields
    given = {name: getattr(adapter, name) for name in names if name in fields}
    given = {name: value for name, value in given.items() if value != fields[name].default}
    return {name: set(value) if isinstance(value, list) else value for name, value in given.items()}


def _held(config: PeftConfig, kind: str, name: str) -> Any:
    if name == "scaling":
        return "rslora" if getattr(config, "use_rslora", False) else "standard"
    peft_name = {"targets": "target_modules"}.get(name, _NAMES[kind].get(name, name))
    held = getattr(config, peft_name, None)
    return set(held) if isinstance(held, list | set) else held


def _differs(name: str, given: object, held: object, folder: str | None) -> ModelError:
    said, has = (", ".join(sorted(value)) if isinstance(value, set) else value for value in (given, held))
    has = "none" if has is None else has
    return ModelError(
        f"adapter.{name} is {said}, and the adapter in adapter.init_from has {has}",
        where=Where(file=folder),
        hint=_HINT,
    )
