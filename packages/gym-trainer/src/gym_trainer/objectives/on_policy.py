"""Rows with answers that the model in training writes itself (arXiv 2306.13649, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gym_data import Document
from gym_data.store import DocumentRole
from gym_serve.engines.base import GenerationRequest, SamplingParams, generate_all
from gym_serve.engines.transformers import TransformersEngine
from gym_trainer.loop.batch import Row, StepBatch
from gym_trainer.objectives.classes import answer_start

_MAX_SLOTS = 32


def with_own_answers(
    model: Any, step: StepBatch, *, share: float, max_tokens: int, stop_ids: tuple[int, ...], seed: int
) -> StepBatch:
    """The step with the last answer of a share of its rows drawn anew from the model, all of it trained.

    Which rows, and what is drawn, follow from the seed, the epoch and the row alone: a resumed run gets the same
    answers from the same weights.
    """
    chosen = [row for row in step.rows if _draw(seed, step.epoch, row.index).random() < share]
    if not chosen:
        return step
    prompts = [_prompt(row) for row in chosen]
    requests = [
        GenerationRequest(
            prompt_ids=prompt.tolist(),
            max_tokens=max_tokens,
            stop_ids=frozenset(stop_ids),
            sampling=SamplingParams(seed=int(_draw(seed, step.epoch, row.index, 1).integers(2**31))),
        )
        for row, prompt in zip(chosen, prompts, strict=True)
    ]
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    with TransformersEngine(model, max_slots=min(_MAX_SLOTS, len(chosen)), context_length=longest + 1) as engine:
        completions = generate_all(engine, requests)
    written = {
        row.index: _row(row, prompt, completion.token_ids)
        for row, prompt, completion in zip(chosen, prompts, completions, strict=True)
    }
    return replace(step, rows=tuple(written.get(row.index, row) for row in step.rows))


def _draw(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def _prompt(row: Row) -> np.ndarray:
    (document,) = row.documents
    return np.asarray(document.ids[: answer_start(document.loss_mask)])


def _row(row: Row, prompt: np.ndarray, answer: Sequence[int]) -> Row:
    ids = np.concatenate([prompt, np.asarray(answer, np.uint32)])
    mask = np.zeros(len(ids), np.uint8)
    mask[len(prompt) :] = 1
    own = Document(ids, mask, row.index, DocumentRole.PLAIN)
    return replace(row, documents=(own,), written_by_model=True)
