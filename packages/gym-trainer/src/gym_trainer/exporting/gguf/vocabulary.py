"""A model's tokenizer as GGUF metadata that gives the same ids, or a refusal.

Two kinds are known to readers: byte-level BPE (`gpt2`), where a name stands for the way text is cut before merging, and
SentencePiece's BPE (`llama`), where a score for each token stands for the order of merges.
"""

from __future__ import annotations

import json
from typing import Any

from gym_data import Tokenizer
from gym_sdk.errors import ModelError
from gym_serve.models.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # gguf.TokenType
_SPACE = "▁"


def vocabulary_metadata(tokenizer: Tokenizer, stop_ids: list[int], num_rows: int) -> dict[str, Any]:
    """The `tokenizer.` keys. `num_rows` is the height of the embedding: rows without a token get an unused one.

    Raises:
        ModelError: a tokenizer that readers of GGUF would not apply exactly.
    """
    spec = json.loads(tokenizer.json_text)
    model = spec["model"]
    if model.get("type") != "BPE":
        raise _unknown(f"of kind {model.get('type')}")
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    tokens, types = _tokens(tokenizer, model, num_rows)
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if model.get("byte_fallback"):
        found |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(tokens, merges),
            "tokenizer.ggml.add_space_prefix": _adds_space(spec),
        }
    else:
        found |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer_name(spec),
            "tokenizer.ggml.merges": merges,
        }
    found["tokenizer.ggml.token_type"] = types
    ids = {"bos": tokenizer.bos_id, "padding": tokenizer.pad_id, "eos": stop_ids[0] if stop_ids else None}
    ids |= {"eot": stop_ids[1] if len(stop_ids) > 1 else None}
    found |= {f"tokenizer.ggml.{role}_token_id": id_ for role, id_ in ids.items() if id_ is not None}
    found["tokenizer.ggml.add_bos_token"] = tokenizer.adds_bos
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _tokens(tokenizer: Tokenizer, model: dict[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    by_id = {id_: token for token, id_ in tokenizer.backend.get_vocab().items()}
    if by_id and max(by_id) >= num_rows:
        raise ModelError(f"the tokenizer has {max(by_id) + 1} ids, the model's embedding {num_rows} rows")
    added = {token.text: _CONTROL if token.special else _USER_DEFINED for token in tokenizer.added_tokens}
    unknown = model.get("unk_token")
    tokens = [by_id.get(i, f"[unused{i}]") for i in range(num_rows)]
    types: list[int] = []
    for i, token in enumerate(tokens):
        if i not in by_id:
            types.append(_UNUSED)
        elif token == unknown:
            types.append(_UNKNOWN)
        elif token in added:
            types.append(added[token])
        elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            types.append(_BYTE)
        else:
            types.append(_NORMAL)
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece merges the pair whose result has the highest score: minus the place of its first merge.

    Raises:
        ModelError: two merges of one result that are not neighbours, which no score can say.
    """
    place: dict[str, int] = {}
    last: dict[str, int] = {}
    results = [merge.replace(" ", "", 1) for merge in merges]
    for number, result in enumerate(results):
        place.setdefault(result, number)
        last[result] = number
    order = sorted(place, key=lambda result: place[result])
    bound = -1
    for result in order:
        if place[result] < bound:
            raise _unknown("whose merges are in no order that scores can express")
        bound = max(bound, last[result])
    return [-float(place[token]) if token in place else 0.0 for token in tokens]


def _adds_space(spec: dict[str, Any]) -> bool:
    """Whether a text starts with the space mark, as in Llama 2, or not, as in Gemma.

    Raises:
        ModelError: anything else that happens before merging.
    """
    steps = _flat(spec.get("normalizer"), "normalizers") + _flat(spec.get("pre_tokenizer"), "pretokenizers")
    adds = False
    for step in steps:
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == _SPACE:
            adds = True
        elif kind == "Metaspace" and step["replacement"] == _SPACE:
            adds = adds or step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE:
            continue
        elif kind == "Split" and step["pattern"] == {"String": " "}:
            continue  # Gemma: after the replacement no space is left to split at
        else:
            raise _unknown(f"with a step {kind} before its merges")
    return adds


def _pre_tokenizer_name(spec: dict[str, Any]) -> str:
    """The name of the way text is cut.

    Raises:
        ModelError: one that has no name in GGUF, or none that is known here to be exact.
    """
    compose = False
    for step in _flat(spec.get("normalizer"), "normalizers"):
        if step["type"] != "NFC":
            raise _unknown(f"with a normaliser {step['type']}")
        compose = True
    regex, digits, own_regex = None, False, None
    for step in _flat(spec.get("pre_tokenizer"), "pretokenizers"):
        kind = step["type"]
        if kind == "Digits" and step.get("individual_digits"):
            digits = True
        elif kind == "Split" and "Regex" in step["pattern"] and regex is None and own_regex is None:
            regex = step["pattern"]["Regex"]
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            own_regex = bool(step.get("use_regex", True))
        else:
            raise _unknown(f"with a step {kind} before its merges")
    if own_regex is None or own_regex == (regex is not None):
        raise _unknown("that is not byte-level")
    cut = PreTokenizer(
        regex=regex, single_digits=digits, whole_words=bool(spec["model"].get("ignore_merges")), compose=compose
    )
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == cut), None)
    if name is None:
        raise _unknown("that cuts text in a way without a name in GGUF")
    return name


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[inner]) if step["type"] == "Sequence" else [step]


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"a tokenizer {what} is not exported to GGUF: readers would give other ids",
        hint="export the merged folder instead (gym export RUN --merge FOLDER)",
    )
