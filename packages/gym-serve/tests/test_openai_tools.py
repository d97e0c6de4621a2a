"""Guards tools as the unmodified `openai` client uses them: whole and streamed calls, and the answer to a call."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from daemon_process import DaemonProcess
from model_folder import write_model
from openai.types.chat import ChatCompletionToolParam

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}[TOOL_CALLS]<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls[0].function.name }}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of the Mistral family, whose calls have no spaces, as the stand-in engine wants it."""
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name in ("find", "count")
]
CALLS = (
    'say:Well.[TOOL_CALLS][{"name":"find","arguments":{"place":"gate"}},{"name":"count","arguments":{"place":"dam"}}]'
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("tools")
    model = write_model(folder / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with DaemonProcess(folder / "data", str(model)) as process:
        process.wait_ready()
        yield openai.OpenAI(base_url=f"{process.http_url}/v1", api_key=process.key, max_retries=0)


def test_calls_are_the_same_whole_and_in_deltas(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": CALLS}], tools=TOOLS
    ).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Well.")
    made = [(call.id, call.type, call.function) for call in answer.message.tool_calls or () if call.type == "function"]
    assert [(kind, function.name, json.loads(function.arguments)) for _, kind, function in made] == [
        ("function", "find", {"place": "gate"}),
        ("function", "count", {"place": "dam"}),
    ]
    assert len({identity for identity, _, _ in made}) == 2

    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": CALLS}], tools=TOOLS, stream=True
    )
    text, reason = "", None
    calls: dict[int, list[str]] = {}
    num_deltas = 0
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            num_deltas += 1
            assert delta.function is not None
            if delta.index not in calls:
                assert (delta.type, bool(delta.id), bool(delta.function.name)) == ("function", True, True)
                calls[delta.index] = [delta.function.name or "", ""]
            else:
                assert (delta.id, delta.function.name) == (None, None), "a call is named once"
            calls[delta.index][1] += delta.function.arguments or ""
    assert (text, reason) == ("Well.", "tool_calls")
    assert list(calls) == [0, 1]
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == [
        ("find", {"place": "gate"}),
        ("count", {"place": "dam"}),
    ]
    assert num_deltas > 4, "arguments come as they are written"


def test_the_clients_own_stream_helper_reads_the_calls(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": CALLS}]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, event.parsed_arguments) for event in done] == [
        ("find", {"place": "gate"}),
        ("count", {"place": "dam"}),
    ]
    assert final.finish_reason == "tool_calls"


def test_the_answer_to_a_call_goes_back_to_the_model(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"place":"gate"}'}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3 elephants"},
        {"role": "user", "content": "say:thanks"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("thanks", "stop")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "where?"}],
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "nobody"}},
        )
    assert "nobody" in refused.value.message
