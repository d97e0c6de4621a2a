"""Guards losslessness: for every format, exporting an imported row gives the row back, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_data._json import dumps, loads
from gym_data.formats import detect, format_named, formats
from gym_data.record import Source

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.text("abcdefghij", min_size=1, max_size=6)
WHOLE = st.integers(-(2**80), 2**80)
JSON = st.recursive(
    st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
EXTRA = st.dictionaries(st.sampled_from(["id", "meta", "x_source", "année"]), JSON, max_size=2)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": NAME, "parameters": JSON})}
    ),
    max_size=2,
)
OPTIONAL_TOOLS = {"tools": TOOLS | st.none() | st.just("[]")}


def optional(**fields: Any) -> dict[str, Any]:
    return fields


CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": NAME, "arguments": st.dictionaries(TEXT, JSON, max_size=2) | TEXT})},
    optional=optional(id=NAME, type=st.just("function"), index=st.integers(0, 3)),
)
SOUND = st.fixed_dictionaries({"data": TEXT, "format": st.just("wav")})
PARTS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}, optional={"cache": JSON}),
        st.fixed_dictionaries({"type": st.just("refusal"), "refusal": TEXT}),
        st.fixed_dictionaries({"type": st.just("reasoning"), "text": TEXT}),
        st.fixed_dictionaries(
            {
                "type": st.just("image_url"),
                "image_url": st.fixed_dictionaries({"url": TEXT}, optional={"detail": st.just("low")}),
            }
        ),
        st.fixed_dictionaries({"type": st.just("image"), "image": TEXT}),
        st.fixed_dictionaries({"type": st.just("audio"), "audio": TEXT}),
        st.fixed_dictionaries({"type": st.just("input_audio"), "input_audio": SOUND}),
    ),
    max_size=4,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional=optional(
        content=TEXT | st.none() | PARTS,
        name=NAME | st.none(),
        tool_call_id=NAME,
        tool_calls=st.lists(CALL, max_size=2) | st.none(),
        refusal=TEXT | st.none(),
        reasoning_content=TEXT | st.none(),
        weight=st.sampled_from([0, 1, None]),
        train=st.booleans() | st.none(),
        audio=JSON,
    ),
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=4)
SIDE = TEXT | MESSAGES

TURN = st.fixed_dictionaries(
    {
        "from": st.sampled_from(["human", "gpt", "user", "assistant", "system", "observation", "tool"]),
        "value": TEXT,
    },
    optional=optional(weight=st.sampled_from([0, 1, None]), train=st.booleans(), note=JSON),
)
CALL_TURN = st.fixed_dictionaries(
    {
        "from": st.sampled_from(["function_call", "tool_call"]),
        "value": st.dictionaries(TEXT, JSON, max_size=2).map(
            lambda arguments: '{"name": "f", "arguments": ' + dumps(arguments) + "}"
        ),
    }
)
TURNS = st.lists(TURN | CALL_TURN, min_size=1, max_size=4)
PLAIN_TURNS = st.lists(TURN.filter(lambda turn: turn["from"] != "system"), min_size=1, max_size=4)


def row(required: dict[str, Any], **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda body, extra: {**extra, **body}, st.fixed_dictionaries(required, optional=fields), EXTRA)


@st.composite
def with_media(draw: st.DrawFn) -> dict[str, Any]:
    images = draw(st.lists(NAME, min_size=1, max_size=3))
    pieces = [draw(TEXT) for _ in range(len(images) + 1)]
    return {"conversations": [{"from": "human", "value": "<image>".join(pieces)}], "images": images}


@st.composite
def shared_prefix(draw: st.DrawFn) -> dict[str, Any]:
    shared = draw(MESSAGES)
    return {"chosen": [*shared, draw(MESSAGE)], "rejected": [*shared, draw(MESSAGE), draw(MESSAGE)]}


def lists(items: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, min_size=length, max_size=length)


# fmt: off
PAIR = {"chosen": TEXT, "rejected": TEXT}
ANSWERED = st.builds(lambda messages: [*messages, {"role": "assistant", "content": "."}], MESSAGES)
ANSWERED_TURNS = st.builds(lambda turns: [*turns, {"from": "gpt", "value": "."}], PLAIN_TURNS)
LABEL = st.booleans() | st.sampled_from(["true", "False"])
SCORE = st.floats(0, 9) | st.integers(0, 9) | st.none()
INPUT = st.fixed_dictionaries({"messages": MESSAGES}, optional={**OPTIONAL_TOOLS, "parallel_tool_calls": JSON})
HISTORY = st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=2) | st.none()

ROWS = {
    "openai": row({"messages": MESSAGES}, **OPTIONAL_TOOLS),
    "openai_reinforcement": row({"messages": MESSAGES}, reference_answer=JSON, **OPTIONAL_TOOLS),
    "openai_preference": row({"input": INPUT, "preferred_output": MESSAGES, "non_preferred_output": MESSAGES}),
    "sharegpt": st.one_of(
        row({"conversations": TURNS}, **OPTIONAL_TOOLS),
        row({"conversations": PLAIN_TURNS}, system=TEXT | st.none(), images=st.just([]) | st.none()),
        row({"conversations": MESSAGES}),
        row({"conversations": PLAIN_TURNS, "chosen": TURN, "rejected": CALL_TURN}),
        row({"conversations": ANSWERED_TURNS, "kto_tag": st.booleans()}),
        with_media(),
    ),
    "alpaca": st.one_of(
        row({"instruction": TEXT, "output": TEXT}, input=TEXT | st.none(), system=TEXT | st.none(), history=HISTORY),
        row({"instruction": TEXT, "output": TEXT, "kto_tag": st.booleans()}, **OPTIONAL_TOOLS),
        row({"instruction": TEXT, **PAIR}, input=TEXT),
    ),
    "prompt_completion": st.one_of(
        row({"prompt": SIDE, "completion": SIDE}, **OPTIONAL_TOOLS),
        row({"question": TEXT, "answer": TEXT}),
    ),
    "preference": st.one_of(
        row({"prompt": TEXT, **PAIR}, score_chosen=SCORE, score_rejected=SCORE),
        shared_prefix(),
    ),
    "unpaired": st.one_of(
        row({"prompt": SIDE, "completion": SIDE, "label": LABEL}, **OPTIONAL_TOOLS),
        row({"messages": ANSWERED, "kto_tag": st.booleans()}),
    ),
    "stepwise": st.integers(0, 3).flatmap(
        lambda n: row({"prompt": SIDE, "completions": lists(TEXT, n), "labels": lists(st.booleans(), n)})
    ),
    "prompt": row({"prompt": SIDE}, answer=JSON, **OPTIONAL_TOOLS),
    "text": row({"text": TEXT}),
    "tokens": st.integers(1, 5).flatmap(
        lambda n: row({"input_ids": lists(st.integers(0, 99), n)}, loss_mask=lists(st.sampled_from([0, 1]), n))
    ),
}
# fmt: on


def test_every_format_has_rows_here() -> None:
    assert ROWS.keys() == formats().keys()


@pytest.mark.parametrize("name", ROWS)
def test_export_gives_the_imported_row_back(name: str) -> None:
    shape = format_named(name)

    @settings(max_examples=150, deadline=None)
    @given(ROWS[name])
    def check(given_row: dict[str, Any]) -> None:
        before = dumps(given_row)
        record = shape.to_record(given_row, Source("f", name, 1))
        assert dumps(given_row) == before, "importing changed the row"
        exported = shape.export(record)
        assert loads(dumps(exported)) == loads(before)

    check()


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"openai", "openai_reinforcement"}))
def test_a_row_is_recognised_as_its_own_format(name: str) -> None:
    @settings(max_examples=30, deadline=None)
    @given(ROWS[name])
    def check(given_row: dict[str, Any]) -> None:
        found = detect(given_row)
        assert found is not None
        assert found.name == name

    check()
