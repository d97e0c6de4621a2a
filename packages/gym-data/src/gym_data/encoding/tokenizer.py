"""A model's tokenizer, read from its folder with the `tokenizers` library alone."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from gym_data.encoding.fast import FastCheck, FastEncoder, fast_encoder
from gym_data.encoding.spec import read_spec, spec_text
from gym_data.encoding.special import AddedToken, SplitEncoder
from gym_sdk.errors import ModelError, Where

MAX_CHECKED_TOKENS = 200
"""Special tokens that the check of the fast way encodes; Gemma has thousands that are never used."""
TEXTS_AT_ONCE = 256
"""Texts whose ids are Python's numbers at a time: few enough that they stay in the processor's cache."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back. Text from a user or a dataset never becomes a special token unless asked to."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        named_tokens: dict[str, str],
        eos_ids: Iterable[int] = (),
        chat_templates: dict[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        """Prefer `from_folder`. `named_tokens` maps `bos_token` and the like to their text."""
        spec = read_spec(tokenizer_json)
        # Special tokens are written by templates, never by a post-processor; without it, offsets are those of the text.
        self._adds_bos = _post_processor_starts_with(spec.get("post_processor"), named_tokens.get("bos_token"))
        spec["post_processor"] = spec["truncation"] = spec["padding"] = None
        self.json_text: str = spec_text(spec)
        self.backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(self.json_text)
        self.sha256: str = hashlib.sha256(
            json.dumps([named_tokens, sorted(eos_ids), chat_templates], sort_keys=True).encode()
            + self.json_text.encode("utf-8", "surrogatepass")
        ).hexdigest()
        self.folder = folder
        self.allow_fast: bool = True
        """Whether `encode_texts` may go the fast way; set before its first use."""
        self.named_tokens = named_tokens
        self.chat_templates: dict[str, str] = chat_templates or {}
        self.added_tokens: tuple[AddedToken, ...] = tuple(
            AddedToken(token.content, id_, token.special, token.lstrip, token.rstrip)
            for id_, token in sorted(self.backend.get_added_tokens_decoder().items())
        )
        self.bos_id: int | None = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        own_eos = [eos] if eos is not None else []
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own_eos, *eos_ids]))
        pad = self._id_of("pad_token")
        self.pad_id: int = pad if pad is not None else self.eos_ids[0] if self.eos_ids else 0
        self.vocab_size: int = _vocab_size(spec, self.backend)
        self._special = SplitEncoder(
            self.json_text, self.added_tokens, {t.text for t in self.added_tokens if t.special}
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a model folder in Hugging Face layout. Raises ModelError when it has none."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                "the model folder has no tokenizer.json",
                where=Where(file=str(folder)),
                hint="Save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
            )
        config = _read_json(folder / "tokenizer_config.json")
        legacy = _read_json(folder / "special_tokens_map.json")
        named: dict[str, str] = {}
        extra = config.get("extra_special_tokens")
        for name in (*_NAMED_TOKENS, *(extra if isinstance(extra, dict) else ())):
            value = config.get(name) or (extra if isinstance(extra, dict) else {}).get(name) or legacy.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                named[name] = value
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is None:
            model = _read_json(folder / "config.json")
            text_model = model.get("text_config")
            eos = model.get("eos_token_id") or (
                text_model.get("eos_token_id") if isinstance(text_model, dict) else None
            )
        eos_ids = [id_ for id_ in (eos if isinstance(eos, list) else [eos]) if isinstance(id_, int)]
        try:
            return cls(
                path.read_text(encoding="utf-8"),
                named_tokens=named,
                eos_ids=eos_ids,
                chat_templates=_chat_templates(folder, config),
                folder=str(folder),
            )
        except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
            raise ModelError(f"tokenizer.json cannot be read: {error}", where=Where(file=str(path))) from None

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the model has one."""
        return self.chat_templates.get("default")

    @property
    def adds_bos(self) -> bool:
        """Whether plain text starts with BOS under this tokenizer."""
        return self._adds_bos

    def encode(self, text: str, special: Literal["split", "allow"] = "split") -> list[int]:
        """Ids of `text`, nothing added. `split` encodes what looks like a special token as ordinary text."""
        if special == "split":
            return self._special.encode(text, self.backend)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_texts(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids side by side and the length of each text; special tokens in the texts are special.

        By the fast way where there is one (`fast_check`).
        """
        if self._fast[0] is not None:
            return self._fast[0].encode(texts)
        parts, lengths = [np.zeros(0, np.uint32)], []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            ids = array("I")
            for one in self.backend.encode_batch_fast(
                list(texts[start : start + TEXTS_AT_ONCE]), add_special_tokens=False
            ):
                found = one.ids
                ids.fromlist(found)
                lengths.append(len(found))
            parts.append(np.array(ids, np.uint32))
        return np.concatenate(parts), np.array(lengths, np.int64)

    @property
    def fast_check(self) -> FastCheck:
        """Which library encodes many texts at once, and why."""
        return self._fast[1]

    @cached_property
    def _fast(self) -> tuple[FastEncoder | None, FastCheck]:
        if not self.allow_fast:
            return None, FastCheck(False, "switched off")
        special = [token.text for token in self.added_tokens if token.special][:MAX_CHECKED_TOKENS]
        return fast_encoder(self.json_text, self.backend, special)

    def decode(self, ids: Sequence[int] | NDArray[np.integer], skip_special: bool = False) -> str:
        """The text of `ids`."""
        return self.backend.decode([int(id_) for id_ in ids], skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        """The id of one token, by its text."""
        return self.backend.token_to_id(token)

    def _id_of(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return self.backend.token_to_id(token) if token is not None else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read as JSON: {error}", where=Where(file=str(path))) from None
    return value if isinstance(value, dict) else {}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files win over the configuration, as in transformers."""
    templates: dict[str, str] = {}
    stored = config.get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        templates.update({item["name"]: item["template"] for item in stored if "name" in item and "template" in item})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _post_processor_starts_with(processor: Any, token: str | None) -> bool:
    """Whether a post-processor puts `token` before a single sequence."""
    if not isinstance(processor, dict) or token is None:
        return False
    if processor.get("type") == "Sequence":
        return any(_post_processor_starts_with(inner, token) for inner in processor.get("processors", []))
    first = (processor.get("single") or [None])[0]
    return isinstance(first, dict) and first.get("SpecialToken", {}).get("id") == token


def _vocab_size(spec: dict[str, Any], backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id. The backend's own dictionary of a large vocabulary takes a second to make."""
    vocab = spec["model"].get("vocab")
    ids = vocab.values() if isinstance(vocab, dict) else backend.get_vocab().values()
    return max(chain(ids, (token["id"] for token in spec.get("added_tokens") or ()), (-1,))) + 1
