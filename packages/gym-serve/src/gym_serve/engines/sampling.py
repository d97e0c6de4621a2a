"""From logits to the next token of each row.

Order, as OpenAI's API and vLLM have it: grammar, logit bias, repetition penalty, presence and frequency penalty,
temperature, then top-k, top-p and min-p. Log-probabilities that are reported are of the model's own distribution,
before any of these.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from gym_serve.engines.base import SamplingParams, Token

_NUCLEUS_GUESS = 128
"""Likeliest tokens that are looked at before a full sort: enough for nearly every nucleus."""


class RowSampler:
    """The sampling state of one request: its generator and the tokens that penalties count."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], device: torch.device) -> None:
        self.params = params
        self.generator: torch.Generator | None = None
        if not params.greedy:
            self.generator = torch.Generator(device)
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(params.seed % 2**63)
        self._prompt_set = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()

    @property
    def changes_logits(self) -> bool:
        params = self.params
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        return bool(params.logit_bias) or bool(penalised)

    def saw(self, token_id: int) -> None:
        """Count a generated token."""
        if self.changes_logits:
            self._counts[token_id] += 1

    def penalise(self, logits_V: torch.Tensor) -> None:
        """Apply bias and penalties in place."""
        params = self.params
        device = logits_V.device
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=device)
            logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=device, dtype=logits_V.dtype)
        if params.repetition_penalty != 1.0:
            ids = torch.tensor(sorted(self._prompt_set | self._counts.keys()), device=device)
            seen = logits_V[ids]
            logits_V[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if (params.presence_penalty or params.frequency_penalty) and self._counts:
            ids = torch.tensor(list(self._counts), device=device)
            counts = torch.tensor(list(self._counts.values()), device=device, dtype=logits_V.dtype)
            logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts


def sample(
    logits_NV: torch.Tensor,
    samplers: Sequence[RowSampler],
    top_logprobs: Sequence[int | None],
    allowed_NV: torch.Tensor | None = None,
) -> list[Token]:
    """Draw a token for each row. `logits_NV` is float32; `allowed_NV` is False where a grammar forbids a token."""
    reported = {i: wanted for i, wanted in enumerate(top_logprobs) if wanted is not None}
    logprobs = {i: torch.log_softmax(logits_NV[i], dim=-1) for i in reported}
    if allowed_NV is not None:
        logits_NV = logits_NV.masked_fill(~allowed_NV, float("-inf"))
    changed = [i for i, sampler in enumerate(samplers) if sampler.changes_logits]
    if changed and allowed_NV is None:
        logits_NV = logits_NV.clone()
    for i in changed:
        samplers[i].penalise(logits_NV[i])
    chosen_N = logits_NV.argmax(dim=-1)
    for i, sampler in enumerate(samplers):
        if sampler.generator is not None:
            chosen_N[i] = _draw(logits_NV[i], sampler.params, sampler.generator)
    ids: list[int] = chosen_N.tolist()
    tokens: list[Token] = []
    for i, (token_id, sampler) in enumerate(zip(ids, samplers, strict=True)):
        sampler.saw(token_id)
        tokens.append(_token(token_id, logprobs[i], reported[i]) if i in reported else Token(token_id))
    return tokens


def _token(token_id: int, logprobs_V: torch.Tensor, num_top: int) -> Token:
    values, ids = logprobs_V.topk(num_top) if num_top else (logprobs_V[:0], logprobs_V[:0])
    top = tuple(zip(map(int, ids.tolist()), values.tolist(), strict=True))
    return Token(token_id, float(logprobs_V[token_id]), top)


def _draw(logits_V: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    """One draw from the tempered and cut distribution of a row."""
    scores = logits_V / params.temperature
    ids: torch.Tensor | None = None
    if params.top_k and params.top_k < scores.shape[0]:
        scores, ids = scores.topk(params.top_k)
    if params.top_p < 1.0:
        scores, ids = _nucleus(scores, ids, params.top_p)
    probabilities = torch.softmax(scores, dim=-1)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
    # The largest p/e with e exponential is a draw from p (the Gumbel-max trick, in another form).
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    place = (probabilities / noise).argmax()
    return place if ids is None else ids[place]


def _nucleus(scores: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest likeliest entries whose probabilities reach `top_p`; at least one."""
    total = torch.logsumexp(scores, dim=-1)
    count = min(_NUCLEUS_GUESS, scores.shape[0])
    while True:
        best, places = scores.topk(count)
        before = (best - total).exp().cumsum(dim=-1)
        if count == scores.shape[0] or before[-1] >= top_p:
            break
        count = min(count * 16, scores.shape[0])
    keep = int((before < top_p).sum()) + 1
    best, places = best[:keep], places[:keep]
    return best, places if ids is None else ids[places]
