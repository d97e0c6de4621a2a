"""The causal language models of the installed transformers, each decoder class once.

transformers maps names of configurations to classes (`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`). Several names may lead to
one class; it is listed once, under the name that its own configuration has, with the others as aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Group = Literal["decoder", "encoder", "encoder-decoder", "multimodal"]
"""`decoder`: made to write text. `encoder`: made to read it (BERT), here with a causal mask. `encoder-decoder`: the
decoder of a pair, without its encoder. `multimodal`: a wrapper around a text decoder that is listed by itself."""

GROUPS: tuple[Group, ...] = ("decoder", "encoder", "encoder-decoder", "multimodal")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One class of causal language models."""

    model_type: str
    class_name: str
    group: Group
    aliases: tuple[str, ...] = ()


def all_architectures() -> list[Architecture]:
    """Every distinct class, by name. Imports the modelling code of each: about ten seconds."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: dict[str, list[str]] = {}
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        names.setdefault(class_name, []).append(model_type)
    found = [_architecture(class_name, model_types) for class_name, model_types in names.items()]
    return sorted(found, key=lambda architecture: (GROUPS.index(architecture.group), architecture.model_type))


def model_class(class_name: str) -> Any:
    """The class itself."""
    import transformers

    return getattr(transformers, class_name)


def _architecture(class_name: str, model_types: list[str]) -> Architecture:
    own = getattr(model_class(class_name).config_class, "model_type", "")
    model_type = own if own in model_types else model_types[0]
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        group=_group(class_name, model_type),
        aliases=tuple(name for name in model_types if name != model_type),
    )


def _group(class_name: str, model_type: str) -> Group:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config_class: Any = model_class(class_name).config_class
    wraps_others = any("text" in name or "vision" in name or "audio" in name for name in config_class.sub_configs)
    if wraps_others or "ForConditionalGeneration" in class_name:
        return "multimodal"
    if getattr(config_class, "is_encoder_decoder", False):
        return "encoder-decoder"
    return "encoder" if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "decoder"
