"""Writing a folder so that it is complete or absent, and what every artifact carries beside its weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gym_data import ChatRenderer, Tokenizer
from gym_sdk.errors import OutputInUse, Where
from gym_sdk.spec import RunSpec
from gym_serve.models import ResolvedModel
from gym_trainer.exporting.score import scores_of, write_padding
from gym_trainer.loop.checkpoint import sync_folder

METADATA_NAME = "gym.json"
METADATA_VERSION = 1

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_TEMPLATES_FOLDER = "additional_chat_templates"


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that a run started from, with the renderer that its training used."""

    resolved: ResolvedModel
    folder: Path
    """Where the tokenizer and the template lie: the model's own folder, or one made for this run."""
    tokenizer: Tokenizer
    renderer: ChatRenderer
    new_token_ids: tuple[int, ...] = ()
    """Of `model.new_tokens`."""

    @classmethod
    def of(cls, resolved: ResolvedModel, *, new_tokens: Sequence[str] = (), chat_template: str | None = None) -> Base:
        """Read the tokenizer and the template of a model folder, or what the specification puts in their place.

        Raises:
            UserError: a new token that the tokenizer has already.
        """
        folder = resolved.folder
        if new_tokens or chat_template is not None:
            from gym_trainer.exporting.tokenizer import changed_tokenizer

            folder = changed_tokenizer(resolved, new_tokens, chat_template)
        tokenizer = Tokenizer.from_folder(folder)
        ids = tuple(tokenizer.backend.token_to_id(token) for token in new_tokens)
        return cls(
            resolved=resolved,
            folder=folder,
            tokenizer=tokenizer,
            renderer=ChatRenderer(tokenizer),
            new_token_ids=tuple(id_ for id_ in ids if id_ is not None),
        )

    def with_tokenizer_of(self, folder: Path) -> Base:
        """The same base under an artifact's own tokenizer and template, which may differ from the base's."""
        tokenizer = Tokenizer.from_folder(folder)
        return replace(self, folder=folder, tokenizer=tokenizer, renderer=ChatRenderer(tokenizer))

    def config(self) -> Any:
        """The base's transformers configuration."""
        from gym_serve.models import read_config

        return read_config(self.resolved.folder)

    @property
    def template_sha256(self) -> str | None:
        """The digest of the chat template that training used."""
        template = self.tokenizer.chat_template
        return hashlib.sha256(template.encode()).hexdigest() if template is not None else None


@contextmanager
def complete_or_absent(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `final` when the block ends well, and vanishes when it does not.

    Raises:
        OutputInUse: `final` is a file, or a folder with something in it, and `replace` is not set.
    """
    if final.exists() and not replace and not (final.is_dir() and not any(final.iterdir())):
        raise OutputInUse(
            "is in use", where=Where(file=str(final)), hint="name a folder that is empty or not there yet"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.with_name(f".{final.name}.partial-{os.getpid()}")
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    try:
        yield staged
        for path in staged.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        sync_folder(staged)
        if final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def write_companions(folder: Path, base: Base, model: Any, metadata: dict[str, Any]) -> None:
    """The exact tokenizer and template of training, the generation config with every id that ends an answer, and where
    the artifact came from."""
    source = base.folder
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / _TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / _TEMPLATES_FOLDER, folder / _TEMPLATES_FOLDER, dirs_exist_ok=True)
    scores = scores_of(model)
    if scores is not None:
        write_padding(folder, base.tokenizer, scores["pad_token_id"])
        metadata = metadata | {"scores": scores}
    stop_ids = list(base.renderer.stop_ids)
    config = getattr(model, "generation_config", None)  # a model that scores has none
    generation = config.to_diff_dict() if config is not None else {}
    generation |= {"eos_token_id": stop_ids, "pad_token_id": base.tokenizer.pad_id}
    if base.tokenizer.bos_id is not None:
        generation["bos_token_id"] = base.tokenizer.bos_id
    _write_json(folder / "generation_config.json", generation)
    _write_json(
        folder / METADATA_NAME,
        {
            "version": METADATA_VERSION,
            "base": {
                "source": base.resolved.source,
                "revision": base.resolved.revision,
                "content_id": base.resolved.content_id,
            },
            "chat_template_sha256": base.template_sha256,
            "stop_ids": stop_ids,
            **metadata,
        },
    )


def read_base(spec: RunSpec, resolved: ResolvedModel) -> Base:
    """The resolved model with the tokenizer and the template that the run trains with."""
    from gym_data.preparing.adapt import template_of

    text = template_of(spec.data)
    return Base.of(resolved, new_tokens=spec.model.new_tokens, chat_template=text)


def size_bytes(folder: Path) -> int:
    """Of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
