"""A model's tokenizer with new tokens, or with another chat template, in a folder of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from gym_sdk.errors import UserError
from gym_sdk.folders import cache_dir
from gym_serve.models import ResolvedModel
from gym_serve.models.cache import make_once
from gym_trainer.exporting.folder import TOKENIZER_FILES

_CONFIGS = ("config.json", "generation_config.json")
"""Which ids end an answer stands here."""


def changed_tokenizer(resolved: ResolvedModel, new_tokens: Sequence[str], chat_template: str | None) -> Path:
    """The folder, made once for the same model, tokens and template.

    Raises:
        UserError: a new token that the tokenizer has already, or two that are equal.
    """
    facts = json.dumps([resolved.content_id, list(new_tokens), chat_template])
    place = cache_dir() / "tokenizers" / hashlib.sha256(facts.encode()).hexdigest()[:32]
    return make_once(place, lambda folder: _write(folder, resolved.folder, new_tokens, chat_template))


def _write(folder: Path, source: Path, new_tokens: Sequence[str], chat_template: str | None) -> None:
    from tokenizers import AddedToken, Tokenizer

    for name in (*TOKENIZER_FILES, *_CONFIGS):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in new_tokens:
        if tokenizer.token_to_id(token) is not None:
            raise UserError(f"model.new_tokens: {token} is a token already", hint="leave it out")
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="")
