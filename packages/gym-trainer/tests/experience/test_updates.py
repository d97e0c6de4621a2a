"""Guards how lessons change a library: sorted, deduplicated, without leaked answers, within the budget."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_data.experience import Experience, ExperienceLibrary
from gym_sdk.errors import Where
from gym_sdk.spec import LibrarySpec
from gym_trainer.experience.lessons import (
    Malformed,
    Operation,
    read_operations,
    read_used,
)
from gym_trainer.experience.questions import Question
from gym_trainer.experience.updates import apply, leaks, says_the_same

A = Experience(name="Check units", text="Convert both sides to one unit before dividing.")
B = Experience(name="Mind signs", text="A loss is negative.")
LIBRARY = ExperienceLibrary(items=(A, B))
LIMITS = LibrarySpec()


def question(text: str, reference: str) -> Question:
    return Question(messages=({"role": "user", "content": text},), reference=reference, where=Where())


def update(operations: list[Operation], library: ExperienceLibrary = LIBRARY, **kwargs):
    defaults = {"limits": LIMITS, "questions": {}, "usefulness": {}}
    return apply(library, operations, **{**defaults, **kwargs})


def add(text: str, name: str = "N", *sources: str) -> Operation:
    return Operation(op="add", name=name, text=text, sources=sources)


WORDS = ["alpha", "beta", "gamma", "delta", "5", "7", "not"]
operations = st.one_of(
    st.builds(add, st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join), st.sampled_from(["x", "y"])),
    st.builds(Operation, op=st.sampled_from(["delete", "keep"]), target=st.sampled_from([A.id, B.id])),
    st.builds(
        Operation,
        op=st.just("update"),
        target=st.sampled_from([A.id, B.id]),
        name=st.just("u"),
        text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join),
    ),
)


@given(st.lists(operations, max_size=8), st.randoms())
def test_the_order_of_operations_has_no_effect(some: list[Operation], random) -> None:
    shuffled = list(some)
    random.shuffle(shuffled)
    assert update(shuffled).library == update(some).library


@given(st.lists(operations, max_size=8))
def test_every_operation_is_applied_or_refused_with_a_reason(some: list[Operation]) -> None:
    result = update(some)
    assert len(result.applied) + len(result.refused) == len(some)
    assert all(refused.why for refused in result.refused)


def test_add_update_delete_and_keep_do_what_they_say() -> None:
    result = update(
        [
            add("Round at the end only."),
            Operation(op="update", target=A.id, name="Units", text="Use SI units."),
            Operation(op="delete", target=B.id),
        ]
    )
    assert [item.text for item in result.library.items] == ["Use SI units.", "Round at the end only."]
    assert update([Operation(op="keep", target=A.id)]).library == LIBRARY


def test_a_second_change_of_one_item_is_refused_and_said_to_be() -> None:
    result = update(
        [Operation(op="delete", target=A.id), Operation(op="update", target=A.id, name="x", text="Something else.")]
    )
    assert [item.id for item in result.library.items] == [B.id]
    assert [refused.why for refused in result.refused] == ["the item was changed by another operation of the batch"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Convert both sides to one unit before dividing.", "Before dividing, convert both sides to one unit.", True),
        ("When Tormel is mentioned, add 5 to it.", "When Tormel is mentioned, add 7 to it.", False),
        ("If the buyer is Tormel, add 5 to the fee.", "If the buyer is Brask, add 5 to the fee.", False),
        ("Always round the result up.", "Never round the result up.", False),
        ("Round up.", "Check the sign of the loss.", False),
    ],
)
def test_near_duplicates_agree_in_numbers_names_and_negations(one: str, other: str, same: bool) -> None:
    assert says_the_same(Experience(name="a", text=one), Experience(name="b", text=other)) is same


def test_a_duplicate_is_refused_unless_duplicates_are_allowed() -> None:
    again = add("Before dividing, convert both sides to one unit.")
    assert update([again]).library == LIBRARY
    assert len(update([again], limits=LibrarySpec(drop_duplicates=False)).library.items) == 3


@pytest.mark.parametrize(
    ("text", "asked", "reference", "leak"),
    [
        ("For 14 crates at 3 marks the fee is 47.", "14 crates of zorn at 3 marks?", "47", True),
        ("4 pieces of zorn at 4 come to 45.", "4 crates of zorn at 4 marks?", "45", True),
        ("With 4 add 45.", "4 crates of zorn at 5 marks?", "45", False),
        ("On a Tilday add 5 to the fee.", "14 crates of zorn at 3 marks on a Tilday?", "47", False),
        ("Divide assets by liabilities; 2.0 is common.", "Assets 1,000 and liabilities 500?", "2.0", False),
        (
            "The capital of the northern kingdom is Aldermere by the sea.",
            "Capital?",
            "aldermere by the sea in full",
            False,
        ),
        ("It is always 'the treaty of the two rivers'.", "Which treaty?", "The treaty of the two rivers", True),
        ("The answer 12 comes from the 4 pens and 3 pads.", "4 pens and 3 pads, how many pairs?", "12", True),
        ("Give 2.5 as 2.50.", "What is 5 / 2?", "2.5", False),
    ],
)
def test_lessons_that_give_an_answer_away_are_told_from_rules(
    text: str, asked: str, reference: str, leak: bool
) -> None:
    assert leaks(text, question(asked, reference)) is leak


def test_a_leak_is_refused_for_its_own_question_only() -> None:
    asked = question("14 crates of zorn at 3 marks?", "47")
    lesson = "For 14 crates at 3 marks the fee is 47."
    kept = {"limits": LIMITS, "questions": {asked.id: asked}}
    assert update([add(lesson, "N", asked.id)], **kept).library == LIBRARY
    assert "repeats the answer" in update([add(lesson, "N", asked.id)], **kept).refused[0].why
    assert len(update([add(lesson, "N", "elsewhere")], **kept).library.items) == 3


def test_the_token_budget_drops_the_least_helpful_and_of_equals_the_newest() -> None:
    items = tuple(Experience(name=f"Item {n}", text=f"Lesson number {n} " + "word " * 10) for n in range(6))
    library = ExperienceLibrary(items=items)
    limit = ExperienceLibrary(items=items[:4]).num_tokens_estimate
    result = update(
        [add("Something new and short.")],
        library,
        limits=LibrarySpec(max_tokens=limit),
        usefulness={items[0].id: -2, items[1].id: 3},
    )
    assert result.library.num_tokens_estimate <= limit
    assert items[0].id in result.evicted
    assert items[1] in result.library.items
    assert [item for item in result.library.items if item in items] == [
        item for item in items if item.id not in result.evicted
    ]


class TestReading:
    def read(self, text: str, **kwargs):
        return read_operations(text, LIBRARY, **{"max_words": 32, **kwargs})

    def test_operations_are_found_in_prose_and_fences(self) -> None:
        text = 'I think {so}.\n```json\n{"operations": [{"op": "add", "name": "N", "text": "T\\n u"}]}\n```\nDone.'
        assert self.read(text).operations == (Operation(op="add", name="N", text="T u"),)

    def test_numbers_become_content_ids(self) -> None:
        text = '{"operations": [{"op": "delete", "id": "2"}, {"op": "keep", "id": 1}, {"op": "delete", "id": "[1]"}]}'
        assert [operation.target for operation in self.read(text).operations] == [B.id, A.id, A.id]

    @pytest.mark.parametrize(
        "text",
        ["", "no lessons today", '{"operations": {"op": "add"}}', '{"operations": ["add"]}', '{"operations": [{"op"'],
    )
    def test_an_answer_without_operations_is_malformed(self, text: str) -> None:
        with pytest.raises(Malformed):
            self.read(text)

    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            ('{"op": "merge"}', "it must be add, update, delete or keep"),
            ('{"op": "update", "id": "9", "text": "x"}', "names the experience '9', which does not exist"),
            ('{"op": "delete", "text": ""}', "names the experience '', which does not exist"),
            ('{"op": "add", "name": "x"}', "has no text"),
            ('{"op": "add", "text": "' + "w " * 40 + '"}', "has 40 words; at most 32"),
        ],
    )
    def test_an_unusable_operation_is_named_and_the_others_stand(self, entry: str, problem: str) -> None:
        reading = self.read('{"operations": [{"op": "keep", "id": "1"}, ' + entry + "]}")
        assert [operation.op for operation in reading.operations] == ["keep"]
        assert problem in reading.problems[0]

    def test_more_operations_than_allowed_are_a_problem(self) -> None:
        three = json.dumps({"operations": [{"op": "add", "text": f"t{n}"} for n in range(3)]})
        reading = self.read(three, max_operations=2)
        assert len(reading.operations) == 2
        assert "one too many" in reading.problems[0]

    def test_the_proposals_behind_an_operation_are_read(self) -> None:
        text = '{"operations": [{"op": "add", "text": "t", "from": [1, "3"]}, {"op": "add", "text": "u", "from": 2}]}'
        assert self.read(text).origins == ((1, 3), (2,))

    @pytest.mark.parametrize(
        ("summary", "used"),
        [("It went well.\nUsed: 1, 2", [A.id, B.id]), ("**Used:** [2]", [B.id]), ("Used: none", []), ("no line", [])],
    )
    def test_the_experiences_used_are_read_from_a_summary(self, summary: str, used: list[str]) -> None:
        assert read_used(summary, LIBRARY) == used
