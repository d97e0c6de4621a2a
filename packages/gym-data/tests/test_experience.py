"""Guards the experience library: its file, its errors, and the one place where it stands in a prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_data.experience import (
    DEFAULT_HEADING,
    Experience,
    ExperienceLibrary,
    estimate_tokens,
    parse_library,
    read_library,
    write_library,
)
from gym_data.formats.openai import messages_from_openai
from gym_sdk.errors import DataError

UNITS = Experience(name="Check units", text="Convert both sides to one unit before dividing.")
SIGNS = Experience(name="Mind signs", text="A loss is negative.")
QUESTION = {"role": "user", "content": "What is 2 + 2?"}

printable = st.text(st.characters(exclude_categories=("Cs", "Cc", "Co", "Cn")), min_size=1, max_size=60).map(
    lambda text: " ".join(text.split())
)
items = st.builds(Experience, name=printable.filter(bool), text=printable.filter(bool))


@given(
    st.builds(
        ExperienceLibrary,
        items=st.lists(items, unique_by=lambda item: item.id, max_size=5).map(tuple),
        placement=st.sampled_from(["system", "user"]),
        heading=printable,
    )
)
def test_a_library_reads_back_as_it_was_written(library: ExperienceLibrary) -> None:
    assert parse_library(library.to_yaml()) == library


def test_the_system_placement_extends_or_begins_the_system_message() -> None:
    library = ExperienceLibrary(items=(UNITS, SIGNS))
    text = f"{DEFAULT_HEADING}\n[1] {UNITS.name}: {UNITS.text}\n[2] {SIGNS.name}: {SIGNS.text}"
    assert library.place([QUESTION]) == [{"role": "system", "content": text}, QUESTION]
    for role in ("system", "developer"):
        before = [{"role": role, "content": "Be brief."}, QUESTION]
        assert library.place(before) == [{"role": role, "content": f"Be brief.\n\n{text}"}, QUESTION]
        assert before[0]["content"] == "Be brief."


def test_the_user_placement_follows_the_last_question() -> None:
    library = ExperienceLibrary(items=(SIGNS,), placement="user", heading="Known:")
    added = f"Known:\n[1] {SIGNS.name}: {SIGNS.text}"
    chat = [QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]
    assert library.place(chat) == [*chat[:2], {"role": "user", "content": f"And 3 + 3?\n\n{added}"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Look"}]}]
    assert library.place(parts)[0]["content"] == [{"type": "text", "text": f"Look\n\n{added}"}]
    picture = {"type": "image_url", "image_url": {"url": "a.png"}}
    placed = library.place([{"role": "user", "content": [picture]}])
    assert placed[0]["content"] == [picture, {"type": "text", "text": added}]
    with pytest.raises(ValueError, match="user message"):
        library.place([{"role": "system", "content": "x"}])


text_parts = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=8)),
        st.just({"type": "image_url", "image_url": {"url": "a.png"}}),
    ),
    max_size=3,
)
chats = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant"]),
            "content": st.one_of(st.text(max_size=8), text_parts),
        }
    ),
    min_size=1,
    max_size=5,
)


@given(chats, st.sampled_from(["system", "user"]))
def test_placing_before_and_after_the_conversion_are_one(chat: list[dict[str, object]], placement: str) -> None:
    library = ExperienceLibrary(items=(UNITS, SIGNS), placement=placement)  # type: ignore[arg-type]
    messages, _ = messages_from_openai(chat)
    if placement == "user" and not any(message["role"] == "user" for message in chat):
        with pytest.raises(ValueError, match="user message"):
            library.place_messages(messages)
        return
    assert library.place_messages(messages) == messages_from_openai(library.place(chat))[0]


def test_an_empty_library_changes_nothing() -> None:
    assert ExperienceLibrary().place([QUESTION]) == [QUESTION]
    assert (
        ExperienceLibrary().place_messages(messages_from_openai([QUESTION])[0]) == messages_from_openai([QUESTION])[0]
    )
    assert ExperienceLibrary().render() == ""


def test_the_id_is_of_the_content_and_not_of_its_spacing() -> None:
    assert Experience(name="Check  units", text=UNITS.text.replace(" ", "\n")).id == UNITS.id
    assert Experience(name="Check units", text=UNITS.text + "!").id != UNITS.id
    assert UNITS.id == "x1865e307e8"


def test_merging_keeps_order_and_drops_equal_content() -> None:
    one, two = ExperienceLibrary(items=(UNITS,)), ExperienceLibrary(items=(SIGNS, UNITS), placement="user")
    assert one.merged_with(two) == ExperienceLibrary(items=(UNITS, SIGNS))
    assert one.merged_with(two).without(UNITS.id).items == (SIGNS,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "library.yaml:1: an experience library is a mapping"),
        ("", "an experience library is a mapping"),
        ("format: gym-experience/1\nexperiences: [\n", "not valid YAML"),
        ("format: gym-experience/9\nexperiences: []\n", "library.yaml:1: format is 'gym-experience/9'"),
        ("placement: user\nexperiences: []\n", "the key 'format' is missing"),
        ("format: gym-experience/1\n", "the key 'experiences' is missing"),
        ("format: gym-experience/1\nplacement: top\nexperiences: []\n", "library.yaml:2: placement is 'top'"),
        ("format: gym-experience/1\nexperiences: none\n", "library.yaml:2: experiences must be a list"),
        ("format: gym-experience/1\nexperiences:\n- just text\n", "library.yaml:3: an experience is a mapping"),
        ("format: gym-experience/1\nexperiences:\n- name: A\n", "library.yaml:3: the key 'text' is missing"),
        ("format: gym-experience/1\nexperiences:\n- name: A\n  text: ''\n", "library.yaml:4: text is empty"),
        ("format: gym-experience/1\nexperiences:\n- name: A\n  text: [b]\n", "library.yaml:4: text must be text"),
        (
            "format: gym-experience/1\nexperiences:\n- name: A\n  txt: b\n",
            "library.yaml:4: an experience has no key 'txt'",
        ),
        (
            "format: gym-experience/1\nexperiences:\n- name: A\n  text: b\n- {name: A, text: b}\n",
            "library.yaml:5: the experience 'A' stands here a second time",
        ),
    ],
)
def test_a_file_edited_into_nonsense_is_one_message_with_its_line(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_library(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_folder_or_a_file_is_read_and_a_missing_one_named(tmp_path: Path) -> None:
    library = ExperienceLibrary(items=(UNITS,))
    write_library(library, tmp_path / "library.yaml")
    assert read_library(tmp_path) == read_library(tmp_path / "library.yaml") == library
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library.yaml"]
    with pytest.raises(DataError, match="no such experience library"):
        read_library(tmp_path / "missing")
    (tmp_path / "latin.yaml").write_bytes("format: é".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        read_library(tmp_path / "latin.yaml")


def test_numbers_and_words_stay_text() -> None:
    text = "format: gym-experience/1\nexperiences:\n- name: 007\n  text: yes\n"
    assert parse_library(text).items == (Experience(name="007", text="yes"),)


def test_tokens_are_estimated_from_bytes() -> None:
    assert [estimate_tokens(text) for text in ("", "abcd", "abcde", "é" * 4)] == [0, 1, 2, 2]


def test_importing_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "yaml", "pydantic")
    code = f"import sys, gym_data.experience; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
