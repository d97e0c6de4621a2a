"""Requests and answers as a vLLM server speaks them: `/v1/completions` with token ids both ways.

Written from the protocol models of vLLM 0.33 (`vllm/entrypoints/openai/completion/protocol.py` and `serving.py`); the
fields in use are there since 0.11. Every sampling field is sent, because what is left out takes the values of the
model's generation config there, and Gym has applied these already. `ignore_eos` is on, so that an answer ends at the
request's own stop ids and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gym_serve.engines.base import EngineError, FinishReason, GenerationRequest, RequestRefused, Token

_PLACEHOLDER = "token_id:"
"""How `return_tokens_as_token_ids` writes tokens in log-probabilities."""
_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


def completion_body(request: GenerationRequest, model: str, context_length: int) -> dict[str, Any]:
    """The body of POST /v1/completions for one request."""
    sampling = request.sampling
    left = context_length - len(request.prompt_ids)
    body: dict[str, Any] = {
        "model": model,
        "request_id": request.id,
        "prompt": list(request.prompt_ids),
        "add_special_tokens": False,
        "max_tokens": left if request.max_tokens is None else min(request.max_tokens, left),
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed % 2**63
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if request.top_logprobs is not None:
        body |= {"logprobs": request.top_logprobs, "return_tokens_as_token_ids": True}
    if request.grammar is not None:
        kind = "json" if request.grammar.lstrip().startswith("{") else "grammar"
        body["structured_outputs"] = {kind: request.grammar}
    return body


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one server-sent event says."""

    tokens: list[Token]
    finish: FinishReason | None
    num_cached_tokens: int | None = None
    """In the last event, of a server with `--enable-prompt-tokens-details`."""


def read_chunk(data: str, top_logprobs: int | None) -> Chunk:
    """One `data:` line's text. Raises EngineError for an error event, and for what is not of the protocol."""
    try:
        event: dict[str, Any] = json.loads(data)
        if error := event.get("error"):
            raise EngineError(f"vLLM: {error['message'] if isinstance(error, dict) else error}")
        if not event["choices"]:
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            return Chunk([], None, details.get("cached_tokens"))
        (choice,) = event["choices"]
        ids: list[int] = choice.get("token_ids") or []
        tokens = [Token(token_id) for token_id in ids]
        if top_logprobs is not None and ids:
            tokens = _with_logprobs(ids, choice["logprobs"], top_logprobs)
        reason = choice.get("finish_reason")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"vLLM sent what is not of its protocol: {error!r}: {data[:200]}") from None
    if reason is None:
        return Chunk(tokens, None)
    if reason not in _ENDS:
        raise EngineError(f"vLLM ended the answer: {reason}", hint="send the request again")
    return Chunk(tokens, _ENDS[reason])


def _with_logprobs(ids: list[int], logprobs: dict[str, Any], top_logprobs: int) -> list[Token]:
    tokens: list[Token] = []
    for token_id, logprob, top in zip(ids, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        # The likeliest stand among the reported ones; the drawn token is one more where it is none of them.
        found = sorted(((_id_of(name), value) for name, value in (top or {}).items()), key=lambda pair: -pair[1])
        tokens.append(Token(token_id, float(logprob), tuple(found[:top_logprobs])))
    return tokens


def _id_of(placeholder: str) -> int:
    if not placeholder.startswith(_PLACEHOLDER):
        raise ValueError(f"{placeholder!r} is no token id")
    return int(placeholder.removeprefix(_PLACEHOLDER))


def refusal(status: int, content: bytes) -> EngineError | RequestRefused:
    """What a status other than 200 says."""
    message = error_message(content)
    if status == 400 or status == 422:
        return RequestRefused(f"vLLM refuses the request: {message}")
    return EngineError(f"vLLM answers {status}: {message}", hint="send the request again")


def error_message(content: bytes) -> str:
    """The message of an error body."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return " ".join(content[:300].decode("utf-8", "replace").split()) or "no message"
