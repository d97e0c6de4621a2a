"""Guards masks of the common template families: against masks marked by hand, transformers' ids, and TRL's marks."""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache

import numpy as np
import pytest
from template_families import CHATS, FAMILIES, HERE, TEMPLATES, record_of

from gym_data import ChatRenderer
from gym_data.rendering.batch import BatchEncoder, Chat
from gym_data.rendering.messages import plain_messages
from gym_sdk.errors import DataError

CASES = [(family, chat) for family in FAMILIES for chat in CHATS]


@cache
def renderer(family: str, suffix: str = "") -> ChatRenderer:
    return ChatRenderer(FAMILIES[family].tokenizer(suffix))


@cache
def marked(family: str) -> dict[str, str]:
    """The texts of a family with ⟦trained⟧ stretches, by chat; `!!!` starts the error of one that is refused."""
    text = (HERE / "marked" / f"{family}.txt").read_text(encoding="utf-8")
    text = text.replace("{today}", datetime.now().strftime("%Y-%m-%d"))
    sections = re.split(r"^### (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {name: body.removesuffix("\n") for name, body in zip(sections[::2], sections[1::2], strict=True)}


def spans_of(marked_text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and the marked characters."""
    plain, spans = "", []
    for index, piece in enumerate(re.split("[⟦⟧]", marked_text)):
        if index % 2:
            spans.append((len(plain), len(plain) + len(piece)))
        plain += piece
    return plain, spans


def test_every_family_is_marked_for_every_chat() -> None:
    assert all(set(marked(family)) == set(CHATS) for family in FAMILIES)


@pytest.mark.parametrize(("family", "chat"), CASES)
def test_masks_equal_the_hand_marked_ones_and_ids_equal_transformers(family: str, chat: str) -> None:
    wanted = marked(family)[chat]
    row, made = CHATS[chat], renderer(family)
    record = record_of(row)
    if wanted.startswith("!!! "):
        with pytest.raises(DataError) as caught:
            made.encode_training(record)
        assert wanted.removeprefix("!!! ") in caught.value.message
        assert str(caught.value).startswith("rows.jsonl:1: ")
        return
    text, spans = spans_of(wanted)
    rendered = made.render_training(record)
    assert rendered.rendered.text == text
    assert list(rendered.trained) == spans

    stock = FAMILIES[family].stock()
    messages = plain_messages(record.messages, made.conventions_of(record.messages))
    assert stock.apply_chat_template(messages, tools=row.get("tools"), tokenize=False) == text
    encoded = made.encode_training(record)
    ids = stock.apply_chat_template(messages, tools=row.get("tools"))["input_ids"]
    assert encoded.ids.tolist() == ids
    offsets = stock(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [any(low <= start < high for low, high in spans) for start, _ in offsets]
    assert encoded.loss_mask.tolist() == inside


@pytest.mark.parametrize(("family", "chat"), CASES)
def test_the_serving_prompt_is_the_training_text_up_to_each_answer(family: str, chat: str) -> None:
    """Parity of training and serving: what a turn is trained to follow is what generation continues from."""
    if marked(family)[chat].startswith("!!! "):
        pytest.skip("the template refuses this chat")
    made, row = renderer(family), CHATS[chat]
    record = record_of(row)
    last = max(i for i, message in enumerate(record.messages) if message.role == "assistant")
    encoded = made.encode_training(record, "last")
    prompt = made.encode_prompt(record.messages[:last], record.tools_json)
    start = int(encoded.loss_mask.argmax())
    if family == "deepseekv3":
        # Its generation prompt opens a reasoning block that the training text of an answer without one does not have.
        think = made.tokenizer.encode("<think>\n", "allow")
        prompt = prompt[: -len(think)] if prompt[-len(think) :] == think else prompt
    assert encoded.ids[:start].tolist() == prompt
    assert encoded.ids[encoded.loss_mask == 1][-1] in made.stop_ids or family == "glm4moe"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_quick_way_gives_the_same_as_the_full_way(family: str) -> None:
    made = renderer(family)
    chats = [chat for chat in CHATS if not marked(family)[chat].startswith("!!! ")]
    records = [record_of(CHATS[chat]) for chat in chats]
    texts = ["four", "<|im_end|> x", "\n\nok", " ", "</think>two", "is it?", "[INST] <｜User｜>", "日本 é"]
    for text in texts:
        records += [
            record_of(
                {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text}{end}"}]}
            )
            for end in ("", "!", " \n")
        ]
    wanted, given = [], []
    for record in records:
        for train_on in ("all", "last"):
            try:
                wanted.append(made.encode_training(record, train_on))
            except DataError:
                continue
            given.append(Chat(record, train_on))
    batch = BatchEncoder(made)
    for _ in range(3):
        for one, other in zip(wanted, batch.encode(given), strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.loss_mask, other.loss_mask)
    assert batch.num_quick > len(given), "no chat went the quick way"


TRL_ALSO_TRAINS = {
    # What TRL's marks take in besides: the end of the generation prompt, which the model is given, and what stands
    # after the stop token, which it never gets to write.
    "qwen2_5": {"\n"},
    "qwen3": {"\n"},
    "gemma": {"\n"},
    "gemma3": {"\n"},
    "phi3": {"\n", "<|endoftext|>"},
    "deepseekv3": {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"},
    "gptoss": {"<|start|>", *"asist", "an"},
}
TRL_FAMILIES = [family for family in FAMILIES if (TEMPLATES / f"{family}_training.jinja").exists()]


@pytest.mark.parametrize(("family", "chat"), [(family, chat) for family in TRL_FAMILIES for chat in CHATS])
def test_masks_equal_those_of_trl_where_theirs_are_right(family: str, chat: str) -> None:
    made = renderer(family, "_training")
    record = record_of(CHATS[chat])
    try:
        encoded = made.encode_training(record)
    except DataError:
        pytest.skip("the template refuses this chat")
    theirs = (
        FAMILIES[family]
        .stock("_training")
        .apply_chat_template(
            plain_messages(record.messages, made.conventions_of(record.messages)),
            tools=CHATS[chat].get("tools"),
            return_assistant_tokens_mask=True,
        )
    )
    assert theirs["input_ids"] == encoded.ids.tolist()
    ours, marks = encoded.loss_mask.astype(bool), np.array(theirs["assistant_masks"], bool)
    assert not (ours & ~marks).any()
    also = {made.tokenizer.decode([int(id_)]) for id_ in encoded.ids[marks & ~ours]}
    assert also <= TRL_ALSO_TRAINS.get(family, set())


def test_a_template_that_hides_its_content_is_an_error_that_names_it() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ '%s' % (m.content,) | upper }}{% endfor %}"
    made = ChatRenderer(FAMILIES["chatml"].tokenizer(), template=source)
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*chat template"):
        made.encode_training(record_of(CHATS["two_turns"]))


def test_a_broken_template_is_an_error_with_its_line() -> None:
    with pytest.raises(DataError, match=r"chat template of .* is not valid Jinja \(line 2\)"):
        ChatRenderer(FAMILIES["chatml"].tokenizer(), template="{{ messages }}\n{% for %}")


def test_a_token_that_the_data_spells_is_never_a_control_token() -> None:
    """DeepSeek's turn markers are added tokens that are not flagged special; a user's text must not write them."""
    made = renderer("deepseekv3")
    record = record_of(
        {"messages": [{"role": "user", "content": "a<｜Assistant｜>b"}, {"role": "assistant", "content": "c"}]}
    )
    ids = made.encode_training(record).ids.tolist()
    assert ids.count(made.tokenizer.id_of("<｜Assistant｜>")) == 1
    prompt = made.encode_prompt(record.prompt)
    assert prompt.count(made.tokenizer.id_of("<｜Assistant｜>")) == 1
    assert made.tokenizer.decode(prompt).count("<｜Assistant｜>") == 2


def test_tags_that_an_answer_writes_stay_tokens() -> None:
    """`<tool_call>` in an answer's own text is what the model has to write; in a user's text it is only text."""
    made = renderer("qwen2_5")
    tag = made.tokenizer.id_of("<tool_call>")
    text = '<tool_call>\n{"name": "f"}\n</tool_call>'
    record = record_of({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]})
    encoded = made.encode_training(record)
    assert encoded.ids.tolist().count(tag) == 1
    assert encoded.loss_mask[encoded.ids.tolist().index(tag)] == 1


@pytest.mark.parametrize("family", ["llama3", "gemma", "gemma3", "deepseekv3", "mistral"])
def test_there_is_exactly_one_bos(family: str) -> None:
    made = renderer(family)
    ids = made.encode_training(record_of(CHATS["two_turns"])).ids.tolist()
    assert ids[0] == made.tokenizer.bos_id
    assert ids.count(made.tokenizer.bos_id) == 1
    assert made.encode_prompt(record_of(CHATS["two_turns"]).messages[:1]).count(made.tokenizer.bos_id) == 1


@pytest.mark.parametrize("family", ["chatml", "qwen2_5", "llama3_1", "glm4moe"])
def test_a_chat_that_begins_with_the_assistant_trains_its_answer_only(family: str) -> None:
    """Not the system text that some templates put before it."""
    made = renderer(family)
    turns = [("assistant", "hello"), ("user", "1+1?"), ("assistant", "2")]
    record = record_of({"messages": [{"role": role, "content": text} for role, text in turns]})
    rendered = made.render_training(record)
    first = rendered.rendered.text[slice(*rendered.trained[0])]
    assert first.removeprefix("\n<think></think>\n").startswith("hello")
    assert len(rendered.trained) == 2
