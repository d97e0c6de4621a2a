"""The fast way from texts to ids: `gigatoken`, where it is installed, knows the tokenizer, and gives the same ids.

It is held to `tokenizers` twice: before its first use on texts made of the vocabulary, of every added token and of what
tokenizers are known to differ in; and in use on a share of the real texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from gym_sdk.errors import RunFailed

CHECKED_EVERY = 256
"""In use, one text of so many is encoded by `tokenizers` too."""
NUM_WORDS = 4000
WORDS_IN_TEXT = 40
_SEPARATORS = ("", " ", "  ", "\n", "\t", "\n\n", ", ", "-")
_HARD = (
    "", " ", "\n", "\r\n", " leading", "trailing ", "a  b   c    d", "\t\ttabs\n\n\nlines \n x", "I'm you're IT'S",
    "1 12 123 1234 12345 123456789 1.5e-10 1,000", "naïve café Ünïcödé", "日本語の文章、中文字符。한국어",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301", "\u00a0\u2003\u200b\ufeff", "\x00\x01\x04\x7f", "ﬁ ﬂ ½ Å Å",
    "def f(x):\n    return x**2  # \\n\n", "العربية", "עברית", "हिन्दी", "\U0001f600" * 9, "a" * 300, " " * 70,
    "http://x.org/?a=b&c=%20", "…—–“”‘’", "ǅ ß ẞ İ ı",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FastCheck:
    """Whether the fast way is used, and what was found."""

    used: bool
    found: str
    """`equal ids for 391 texts`, or why it is not used."""

    @property
    def path(self) -> str:
        """The library that encodes."""
        return f"gigatoken {version('gigatoken')}" if self.used else f"tokenizers {tokenizers.__version__}"


class FastEncoder:
    """Encodes texts with added tokens recognised, as `tokenizers` does without a post-processor."""

    def __init__(self, encoder: Any, backend: tokenizers.Tokenizer) -> None:
        self._encoder = encoder
        self._backend = backend
        self._num_texts = 0

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids side by side and the length of each text. Raises RunFailed when a checked text differs."""
        ids, offsets = encoded(self._encoder, texts)
        first = -self._num_texts % CHECKED_EVERY
        self._num_texts += len(texts)
        for index in range(first, len(texts), CHECKED_EVERY):
            given = ids[offsets[index] : offsets[index + 1]].tolist()
            if given != self._backend.encode(texts[index], add_special_tokens=False).ids:
                raise RunFailed(
                    "gigatoken and tokenizers give different ids for a text",
                    hint="pip uninstall gigatoken, and run again",
                )
        return ids, np.diff(offsets)


def fast_encoder(
    tokenizer_json: str, backend: tokenizers.Tokenizer, added: Sequence[str]
) -> tuple[FastEncoder | None, FastCheck]:
    """The fast way for a tokenizer, or None, and why."""
    try:
        import gigatoken
    except ImportError:
        return None, FastCheck(False, "gigatoken is not installed (pip install 'gym-data[fast]')")
    try:
        encoder = gigatoken.Tokenizer.from_json(tokenizer_json)
        texts = check_texts(backend, added)
        ids, offsets = encoded(encoder, texts)
    except Exception as error:  # noqa: BLE001 - it raises bare exceptions for tokenizers that it does not know
        return None, FastCheck(False, f"gigatoken refuses this tokenizer: {str(error).strip().splitlines()[0]}")
    expected = [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
    for index, text in enumerate(texts):
        if ids[offsets[index] : offsets[index + 1]].tolist() != expected[index]:
            return None, FastCheck(False, f"gigatoken gives other ids for {text[:40]!r}")
    return FastEncoder(encoder, backend), FastCheck(True, f"equal ids for {len(texts)} texts")


def encoded(encoder: Any, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Ids [T] and offsets [N+1]."""
    layout = encoder.encode_batch(list(texts), parallel=False).layout
    offsets = np.asarray(layout.offsets.data, np.int64)
    return np.asarray(layout.content.data, np.uint32), offsets


def check_texts(backend: tokenizers.Tokenizer, added: Sequence[str]) -> list[str]:
    """Texts of the whole kind that a tokenizer may meet; the same ones each time."""
    random = np.random.default_rng(0)
    size = backend.get_vocab_size()
    drawn = random.integers(0, size, NUM_WORDS).tolist()
    words = [backend.decode([id_], skip_special_tokens=False) for id_ in drawn]
    pieces = iter(list(chain.from_iterable(zip(words, cycle(_SEPARATORS), strict=False))))
    made = []
    while text := "".join(islice(pieces, 2 * WORDS_IN_TEXT)):
        made.append(text)
    control = [form for token in added for form in (token, f"a{token}b", f"x {token} {token}\ny")]
    return [*_HARD, *made, *control, json.dumps([*_HARD], ensure_ascii=False)]
