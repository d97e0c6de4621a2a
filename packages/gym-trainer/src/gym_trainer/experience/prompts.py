"""What the teacher is asked. The wording is Gym's own; the steps are those of arXiv 2510.08191.

`method.prompts` replaces the wordings; what an operation looks like is always said after them, because it is read back.

Experiences are shown to student and teacher under the same numbers, `[1]`, `[2]`, ...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gym_data.experience import ExperienceLibrary
from gym_sdk.spec.training_free import PLACEHOLDER

Message = dict[str, Any]

OPERATIONS_FORMAT = """\
Answer with one JSON object and nothing after it:
{"operations": [
  {"op": "add", "name": "<three to six words>", "text": "<the experience>"},
  {"op": "update", "id": "<number of an experience>", "name": "...", "text": "<its new wording>"},
  {"op": "delete", "id": "<number of an experience that misled>"},
  {"op": "keep", "id": "<number of an experience that helped>"}
]}
Leave out the operations you do not need; the list may be empty."""

NO_EXPERIENCES = "(none yet)"


SUMMARY = """\
An assistant tried to answer a question. Summarise its attempt for a colleague who will compare several attempts.

Experiences that the assistant had been given:
{experiences}

Question:
{question}

{grade}{attempt}

Go through the attempt step by step: what was done, why, which experience was followed, and where and why it went
wrong or what made it succeed. Keep every number, rule and intermediate result that matters. End with a line
"Used: " and the numbers of the experiences that the attempt followed, or "Used: none"."""

CRITIQUE = """\
An assistant made several attempts at one question. Your task is to improve the short list of experiences that it is
given before every question of this kind.

Experiences so far:
{experiences}

Question:
{question}

{reference}{attempts}

{task} Write down at most {max_operations} on the
list of experiences. A good experience
- holds for other questions of this kind, not only for this one: no answers, no particular quantities of this question;
- says when it applies and what to do then, precisely enough to be followed;
- has at most {max_words} words, and says nothing that the list says already.
Update an experience that is wrong or incomplete rather than adding a second one beside it; delete one that misled."""

CONSOLIDATION = """\
A list of experiences is given to an assistant before every question of a kind. Colleagues who each looked at one
question propose changes. Turn their proposals into one final set of operations.

Experiences so far:
{experiences}

Proposals:
{proposals}

- Merge proposals that say the same into one; keep the most precise wording.
- Where proposals contradict each other or the list, keep what more of them support; leave out what nothing supports.
- Leave out what holds for a single question only, and what the list says already.
- Each experience has at most {max_words} words.
Add to each operation "from": the list of the numbers of the proposals that it rests on."""

COMPARE = (
    "Compare the correct attempts with the wrong ones: what did those that succeeded do, know or avoid that the "
    "others did not?"
)
JUDGE = (
    "No grades are known. Judge the attempts by their reasoning and by where they agree, and find what the "
    "better ones do, know or avoid."
)


def summary_messages(
    question: str,
    attempt: str,
    *,
    library: ExperienceLibrary,
    verdict: str | None,
    reference: str | None,
    by_majority: bool = False,
    wording: str | None = None,
) -> list[Message]:
    """Summarise one attempt. `wording` stands in the place of SUMMARY."""
    grade = f"The attempt is {verdict}.\n" if verdict else ""
    if verdict and reference is not None:
        grade = f"{_agreed(reference) if by_majority else f'The correct answer is {reference}.'} {grade}"
    shown = f"Attempt{f' ({verdict})' if verdict else ''}:\n{attempt}"
    return _ask(
        _fill(wording or SUMMARY, experiences=_numbered(library), question=question, grade=grade, attempt=shown)
    )


def critique_messages(
    question: str,
    attempts: Sequence[tuple[str, str | None]],
    *,
    library: ExperienceLibrary,
    reference: str | None,
    max_operations: int,
    max_words: int,
    by_majority: bool = False,
    wording: str | None = None,
) -> list[Message]:
    """Draw lessons from a group. `attempts` are texts with their verdicts; without verdicts the teacher judges.

    With `by_majority` the verdicts rest on what most attempts agree on, and the teacher is told so. `wording` stands in
    the place of CRITIQUE.
    """
    shown = "\n\n".join(
        f"Attempt {number}{f' ({verdict})' if verdict else ''}:\n{text}"
        for number, (text, verdict) in enumerate(attempts, 1)
    )
    graded = any(verdict for _, verdict in attempts)
    known = ""
    if reference is not None and graded:
        known = f"{_agreed(reference) if by_majority else f'The correct answer is {reference}.'}\n\n"
    text = _fill(
        wording or CRITIQUE,
        experiences=_numbered(library),
        question=question,
        reference=known,
        attempts=shown,
        task=COMPARE if graded else JUDGE,
        max_operations=f"{_number_word(max_operations)} {'operation' if max_operations == 1 else 'operations'}",
        max_words=str(max_words),
    )
    return _ask(f"{text}\n\n{OPERATIONS_FORMAT}")


def consolidation_messages(
    proposals: Sequence[dict[str, str]], *, library: ExperienceLibrary, max_words: int, wording: str | None = None
) -> list[Message]:
    """Turn a batch's proposals into one list of operations. `wording` stands in the place of CONSOLIDATION."""
    lines = "\n".join(json.dumps({"proposal": n, **p}, ensure_ascii=False) for n, p in enumerate(proposals, 1))
    text = _fill(wording or CONSOLIDATION, experiences=_numbered(library), proposals=lines, max_words=str(max_words))
    return _ask(f"{text}\n\n{OPERATIONS_FORMAT}")


def tips_messages(examples: Sequence[tuple[str, str | None]], *, max_tips: int, max_words: int) -> list[Message]:
    """The baseline without attempts: lessons written directly from questions and answers."""
    shown = "\n\n".join(
        f"Question: {question}\nThe correct answer is {answer}." if answer is not None else f"Question: {question}"
        for question, answer in examples
    )
    return _ask(f"""\
Here are questions that an assistant will have to answer, with their correct answers.

{shown}

Write experiences that will help it with other questions of this kind: at most {max_tips} tips, each of at most
{max_words} words, as operations of the kind "add".

{OPERATIONS_FORMAT}""")


def repair_messages(messages: Sequence[Message], answer: str, problem: str) -> list[Message]:
    """Ask once more after a malformed answer."""
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {
            "role": "user",
            "content": f"That answer cannot be used: {problem}\n\nGive the whole answer again. {OPERATIONS_FORMAT}",
        },
    ]


def _fill(wording: str, **values: str) -> str:
    """Each `{name}` replaced once; braces inside the values stay as they are."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), wording)


def _ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _agreed(reference: str) -> str:
    return f"The right answer is not known; most attempts agree on {reference}, and count as correct."


def _numbered(library: ExperienceLibrary) -> str:
    if not library.items:
        return NO_EXPERIENCES
    return "\n".join(f"[{number}] {item.name}: {item.text}" for number, item in enumerate(library.items, 1))


def _number_word(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five")
    return words[number] if number < len(words) else str(number)
