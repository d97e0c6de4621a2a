"""The tokenizer inside a GGUF file, as a `tokenizer.json` that gives the same ids.

A GGUF file holds the vocabulary, the merges and a name for the way text is cut before merging (`tokenizer.ggml.pre`).
The name stands for regular expressions that live in llama.cpp (`llama-vocab.cpp`) and in each model's own
`tokenizer.json`; `PRE_TOKENIZERS` has those of the names below. A file with another name is refused: a nearly right
pre-tokenizer gives nearly right ids, which nobody notices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merging."""

    regex: str | None = None
    """The pieces; GPT-2's own when None."""

    single_digits: bool = False
    """Cut every digit off first."""

    whole_words: bool = False
    """A piece that is in the vocabulary is one token, whatever the merges say (`ignore_merges`)."""

    compose: bool = False
    """Normalise to Unicode NFC first."""


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "starcoder": PreTokenizer(single_digits=True),
    "llama-bpe": PreTokenizer(regex=_LLAMA3, whole_words=True),
    "qwen2": PreTokenizer(regex=_QWEN2, compose=True),
    "deepseek-r1-qwen": PreTokenizer(regex=_QWEN2, compose=True),
    "dbrx": PreTokenizer(regex=_LLAMA3),
    "gpt-4o": PreTokenizer(regex=_O200K),
    "tekken": PreTokenizer(regex=_TEKKEN, whole_words=True),
}


@dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """A tokenizer read from GGUF metadata, and the ids that go into the generation config."""

    tokenizer: Tokenizer
    config: Mapping[str, Any]
    chat_template: str | None
    bos_id: int | None
    stop_ids: list[int]
    """The ids that end a text or a turn."""
    pad_id: int | None

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and, where there is one, `chat_template.jinja`."""
        self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8", newline="")


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> GgufTokenizer:
    """Build the tokenizer that GGUF `metadata` describes; `path` is for messages.

    Raises:
        ModelError: a tokenizer family or pre-tokenizer that is not known exactly.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    family = metadata.get("tokenizer.ggml.model")
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if family != "gpt2" or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{path} has a tokenizer of kind {family}/{name}, which cannot be rebuilt exactly",
            hint=f"known: gpt2/{{{', '.join(PRE_TOKENIZERS)}}}; use the model that the file was made from "
            "(a hub id, or a folder in Hugging Face layout)",
        )
    cut = PRE_TOKENIZERS[name]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=cut.whole_words)
    )
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.regex:
        steps.append(pre_tokenizers.Split(Regex(cut.regex), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)), use_regex=cut.regex is None
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()

    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)

    def token_id(role: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return int(value) if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos, eos, pad, unk = token_id("bos"), token_id("eos"), token_id("padding"), token_id("unknown")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
    if add_bos and bos is not None:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{tokens[bos]} $A",
                    pair=f"{tokens[bos]} $A {tokens[bos]} $B",
                    special_tokens=[(tokens[bos], bos)],
                ),
            ]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    stops = [i for i in (eos, token_id("eot"), token_id("eom")) if i is not None]
    architecture = metadata["general.architecture"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{architecture}.context_length"),
    }
    config |= {
        f"{role}_token": tokens[i]
        for role, i in (("bos", bos), ("eos", eos), ("pad", pad), ("unk", unk))
        if i is not None
    }
    template = metadata.get("tokenizer.chat_template")
    return GgufTokenizer(
        tokenizer=tokenizer,
        config=config,
        chat_template=template if isinstance(template, str) else None,
        bos_id=bos,
        stop_ids=list(dict.fromkeys(stops)),
        pad_id=pad,
    )
