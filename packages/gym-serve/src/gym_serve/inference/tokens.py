"""Tokens as bytes: what a token stands for, also when it is part of a character."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from gym_data import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one token, as OpenAI's `logprobs` reports them."""
    token = tokenizer.backend.id_to_token(token_id)
    if token is None:  # an id of the model's padding
        return b""
    if any(added.id == token_id for added in tokenizer.added_tokens):
        return token.encode()
    if _is_byte_level(tokenizer.backend.decoder.__getstate__() if tokenizer.backend.decoder else b"{}"):
        table = _byte_of_character()
        return bytes(table[c] for c in token if c in table)
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


@lru_cache(maxsize=16)
def _is_byte_level(decoder: bytes) -> bool:
    return "ByteLevel" in json.dumps(json.loads(decoder))


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
