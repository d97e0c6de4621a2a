"""Answers held to a JSON Schema or a grammar: which tokens may come next, computed by llguidance.

llguidance (MIT, Microsoft) walks the grammar lazily with the tokenizer's byte trie, so a schema costs no compilation of
automata beforehand, and it covers more of JSON Schema than its peers; what it does not cover is refused, never ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gym_sdk.errors import MissingExtra
from gym_serve.engines.base import RequestRefused

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLTokenizer


class GrammarMatcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        """[V] True for the tokens that may come next, end-of-sequence among them when the answer may end here."""
        import torch

        return torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0

    def consume(self, token_id: int) -> None:
        """Move on by the token that was drawn."""
        if not self._matcher.consume_token(token_id):
            raise RequestRefused(f"the grammar cannot go on: {self._matcher.get_error()}")

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Matchers for one tokenizer."""

    def __init__(self, tokenizer_json: Path, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may be padded beyond the tokenizer's."""
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}

    def matcher(self, grammar: str, stop_ids: frozenset[int]) -> GrammarMatcher:
        """A matcher at the start of `grammar`: a JSON Schema (text that starts with `{`) or a Lark grammar.

        Raises:
            RequestRefused: the grammar is not valid, or asks for what cannot be held.
        """
        from llguidance import LLMatcher, LLTokenizer

        if stop_ids not in self._tokenizers:
            self._tokenizers[stop_ids] = LLTokenizer(
                self._path.read_text(encoding="utf-8"), n_vocab=self._vocab_size, eos_token=sorted(stop_ids) or None
            )
        matcher = LLMatcher(self._tokenizers[stop_ids], _source(grammar), log_level=0)
        if matcher.is_error():
            raise RequestRefused(f"the grammar cannot be held: {matcher.get_error().strip()}")
        return GrammarMatcher(matcher)


def check_grammar(grammar: str) -> None:
    """Refuse a grammar that is not valid, or asks for what cannot be held. Needs neither torch nor a tokenizer.

    Raises:
        RequestRefused: with llguidance's reason.
        MissingExtra: llguidance is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise MissingExtra("a response format", package="gym-serve", extra="torch") from error
    is_error, messages = LLMatcher.validate_grammar_with_warnings(_source(grammar))
    if is_error:
        raise RequestRefused(f"the grammar cannot be held: {messages[0].strip()}")


def _source(grammar: str) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher

    if grammar.lstrip().startswith("{"):
        try:
            return LLMatcher.grammar_from_json_schema(json.loads(grammar))
        except ValueError as error:
            raise RequestRefused(f"the schema is not JSON: {error}") from error
    return LLMatcher.grammar_from_lark(grammar)
