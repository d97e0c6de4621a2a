"""One renderer for training and serving: messages to ids by the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gym_data.encoding.special import SplitEncoder
from gym_data.encoding.tokenizer import Tokenizer
from gym_data.record import Message, Part, Record, ToolCall, text_message
from gym_data.rendering.messages import Conventions, plain_messages, plain_tools, traced_messages, traced_tools
from gym_data.rendering.spans import CannotMask, Span, StopTokens, find_spans, pieces_of
from gym_data.rendering.template import ChatTemplate, Rendered, TemplateFailed
from gym_data.rendering.traced import CALL, CONTENT, MARK, REASONING, UNKNOWN, field_of, is_trusted
from gym_sdk.errors import DataError, Where

_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)

TrainOn = Literal["all", "last", "weights", "completion"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row as the model sees it."""

    ids: NDArray[np.uint32]
    """[T] token ids."""
    loss_mask: NDArray[np.uint8]
    """[T] 1 where the token is a training target."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered row: its text, its assistant turns, and which of them are trained."""

    rendered: Rendered
    spans: tuple[Span, ...]
    trained: tuple[tuple[int, int], ...]
    """Trained characters, `[start, stop)`."""
    left_out: tuple[str, ...] = ()
    """Fields of assistant messages that the template does not write: `messages[1].reasoning`."""


class ChatRenderer:
    """Renders chats with one tokenizer and its template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        options: dict[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        """`template` replaces the model's own; `options` are variables that it reads (`enable_thinking`).

        `now` is what a template is told when it asks for the date; the time of each rendering when not given.
        """
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = dict(options or {})
        place = tokenizer.folder or "the tokenizer"
        sources = {"default": template} if template is not None else tokenizer.chat_templates
        if not sources:
            raise DataError(
                "the model has no chat template",
                where=Where(file=tokenizer.folder),
                hint="Use an instruction-tuned model, or set data.chat_template to a Jinja file.",
            )
        self._templates = {
            name: ChatTemplate(source, name=f"the chat template of {place}", tokens=tokenizer.named_tokens, now=now)
            for name, source in sources.items()
        }
        self.main_template: ChatTemplate = self._templates.get("default") or next(iter(self._templates.values()))
        written = "\0".join(text for template in self._templates.values() for text in template.constants)
        # DeepSeek's turn markers are added tokens not flagged special: a mark-up token that the template writes is a
        # control token too. Spaces and words are not, though Gemma adds some of them as tokens.
        control = {
            token.text
            for token in tokenizer.added_tokens
            if token.special or (_MARKUP.fullmatch(token.text) and token.text in written)
        }
        self.control_tokens: frozenset[str] = frozenset(control)
        self._splitter = SplitEncoder(tokenizer.json_text, tokenizer.added_tokens, control)
        own = {token.text for token in tokenizer.added_tokens if not token.special} & control
        self._assistants_own = frozenset(own)

    # Prompts

    def encode_prompt(self, messages: Sequence[Message], tools_json: str | None = None, **options: Any) -> list[int]:
        """Ids to continue from: the chat and the generation prompt."""
        how = self.conventions_of(messages)
        rendered = self._render(self._template(tools_json), messages, how, tools_json, True, options)
        self._refuse_dropped(rendered, messages)
        return [id_ for id_, _ in self._encode(rendered, messages)]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which generation stops: the model's end-of-sequence ids and the template's end of an answer."""
        end = self.tokenizer.id_of(self._answer_end) if self._answer_end else None
        ends = [end] if end is not None else []
        return tuple(dict.fromkeys([*self.tokenizer.eos_ids, *ends]))

    # Training

    def encode_training(self, record: Record, train_on: TrainOn = "all") -> Encoded:
        """Ids and loss mask of a chat. Raises DataError, naming the record's row, when it cannot be rendered."""
        chat = self.render_training(record, train_on)
        return self.encode_rendered(chat, record)

    def encode_rendered(self, chat: RenderedChat, record: Record) -> Encoded:
        """Ids and loss mask of a rendered chat. A token is trained when its first character is."""
        try:
            tokens = self._encode(chat.rendered, record.messages)
        except DataError as error:
            raise _located(error.message, record) from None
        ids = np.fromiter((id_ for id_, _ in tokens), np.uint32, len(tokens))
        starts = np.fromiter((start for _, start in tokens), np.int64, len(tokens))
        mask = np.zeros(len(tokens), np.uint8)
        for start, stop in chat.trained:
            mask[(starts >= start) & (starts < stop)] = 1
        return Encoded(ids, mask)

    def render_training(self, record: Record, train_on: TrainOn = "all") -> RenderedChat:
        """The text of a chat with its assistant turns."""
        messages = record.messages
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise _located("the chat has no assistant turn to train on", record)
        template = self._template(record.tools_json)
        try:
            how = self.conventions_of(messages)

            def traced(count: int, prompt: bool) -> Rendered:
                return self._render(template, messages[:count], how, record.tools_json, prompt, {})

            full = traced(len(messages), False)
            self._refuse_dropped(full, messages)
            spans = find_spans(
                full,
                turns,
                lambda turn: traced(turn, True),
                lambda turn: traced(turn + 1, False),
                lambda: self._generation_prompt,
                self._stops,
                self._added_pattern,
            )
        except DataError as error:
            raise _located(error.message, record, error.hint) from None
        except CannotMask as error:
            raise _located(
                f"{template.name} does not let assistant turns be told apart: {error}",
                record,
                "Use a template that writes each turn between its generation prompt and a stop token.",
            ) from None
        trained = [
            piece
            for span in spans
            if is_trained(messages, span.message, train_on, len(record.prompt))
            for piece in span.pieces
        ]
        return RenderedChat(full, tuple(spans), tuple(trained), tuple(_left_out(full, messages)))

    # Rendering

    def render_plain(self, messages: list[dict[str, Any]]) -> str:
        """The text of a chat without tools, as transformers renders it. Raises TemplateFailed."""
        return self.main_template.render_plain(messages, **self._variables(False, {}), tools=None)

    def render_recorded(self, messages: list[dict[str, str]], prompt: bool) -> str:
        """The text of a chat without tools whose texts are `Recorded`. Raises Untraceable and TemplateFailed."""
        return self.main_template.render_recorded(messages, **self._variables(prompt, {}), tools=None)

    def _variables(self, prompt: bool, options: dict[str, Any]) -> dict[str, Any]:
        return {**self.options, **options, "documents": None, "add_generation_prompt": prompt}

    def _template(self, tools_json: str | None) -> ChatTemplate:
        return self._templates.get("tool_use", self.main_template) if tools_json else self.main_template

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        how: Conventions,
        tools_json: str | None,
        prompt: bool,
        options: dict[str, Any],
    ) -> Rendered:
        variables = self._variables(prompt, options)
        try:
            plain = template.render_plain(plain_messages(messages, how), tools=plain_tools(tools_json), **variables)
            rendered = template.render_traced(
                traced_messages(messages, how), tools=traced_tools(tools_json), **variables
            )
        except TemplateFailed as error:
            raise DataError(str(error)) from None
        if rendered.text != plain:
            raise DataError(f"{template.name} renders differently when traced, so its turns cannot be masked")
        return rendered

    def _refuse_dropped(self, rendered: Rendered, messages: Sequence[Message]) -> None:
        """A message that leaves no trace in the text was dropped by the template; reasoning may be."""
        fields = {(piece.message, field_of(piece.source)) for piece in pieces_of(rendered) if piece.is_content}
        seen = {message for message, _ in fields}
        for index, message in enumerate(messages):
            if message.text.strip() and index not in seen:
                raise DataError(f"the chat template leaves out messages[{index}] (role {message.role})")
            for number, call in enumerate(message.calls):
                if (index, CALL + number) not in fields:
                    raise DataError(f"the chat template leaves out the call of {call.name} in messages[{index}]")

    # Encoding

    def _encode(self, rendered: Rendered, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """`(id, first character)` of each token. Control tokens in text that is not the template's own stay text."""
        text = rendered.text
        occurrences = self._splitter.occurrences(text)
        rejected = {span for span in occurrences if self._is_foreign(text, span, rendered, messages)}
        if rejected:
            return self._splitter.encode_with_starts(text, lambda start, stop: (start, stop) in rejected)
        encoded = self.tokenizer.backend.encode(text, add_special_tokens=False)
        return list(zip(encoded.ids, (start for start, _ in encoded.offsets), strict=True))

    def _is_foreign(self, text: str, span: tuple[int, int], rendered: Rendered, messages: Sequence[Message]) -> bool:
        start, stop = span
        token = text[start:stop]
        for piece in pieces_of(rendered):
            if piece.stop <= start or piece.start >= stop or is_trusted(piece.source):
                continue
            if piece.source & ~MARK == UNKNOWN:
                if not any(token in part for message in messages for part in _texts(message)):
                    continue
                raise DataError(f"it cannot be told whether the template or a message wrote {token!r}")
            own = piece.message is not None and messages[piece.message].role == "assistant"
            if own and token in self._assistants_own:
                continue  # `<think>` and `<tool_call>` in an answer are what the model has to write
            return True
        return False

    # What the template does, found by probing it

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the tokens that only a template may write."""
        texts = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        texts = sorted((token.text for token in self.tokenizer.added_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _stops(self) -> StopTokens:
        eos = {self.tokenizer.backend.id_to_token(id_) for id_ in self.tokenizer.eos_ids}
        ends = {token for token in (self._user_end, self._answer_end) if token}
        return StopTokens(frozenset(token for token in eos if token), frozenset(ends))

    @cached_property
    def _generation_prompt(self) -> str:
        """What `add_generation_prompt` adds after a user's turn."""
        chat = [text_message("user", "a")]
        try:
            without, prompt = (
                self._render(self.main_template, chat, self.plain_conventions, None, wanted, {}).text
                for wanted in (False, True)
            )
        except DataError:
            return ""
        return prompt[len(without) :] if prompt.startswith(without) else ""

    @cached_property
    def _user_end(self) -> str | None:
        """The control token after a user's turn, where the template writes one."""
        tail = self._tail_of([text_message("user", "a")])
        return self._first_control(tail)

    @cached_property
    def _answer_end(self) -> str | None:
        """The token after the last answer."""
        tail = self._tail_of([text_message("user", "a"), text_message("assistant", "b")])
        known = {self.tokenizer.backend.id_to_token(id_) for id_ in self.tokenizer.eos_ids} | {self._user_end}
        found = [(at, token) for token in known if token and (at := tail.find(token)) >= 0]
        return min(found)[1] if found else self._first_control(tail)

    def _tail_of(self, messages: Sequence[Message]) -> str:
        """What the template writes after the content of the last message."""
        try:
            rendered = self._render(self.main_template, messages, Conventions(), None, False, {})
        except DataError:
            return ""
        content = [piece for piece in pieces_of(rendered) if piece.message == len(messages) - 1 and piece.is_content]
        return rendered.text[content[-1].stop :] if content else ""

    def _first_control(self, text: str) -> str | None:
        found = self._splitter.occurrences(text)
        return text[found[0][0] : found[0][1]] if found else None

    def conventions_of(self, messages: Sequence[Message]) -> Conventions:
        """How the template wants these messages."""
        if any(message.calls for message in messages):
            return self._tool_conventions
        return self.plain_conventions

    @cached_property
    def plain_conventions(self) -> Conventions:
        """How the template wants messages without calls."""
        knows = any("developer" in template.source for template in self._templates.values())
        return Conventions(developer="developer" if knows else "system")

    @cached_property
    def _tool_conventions(self) -> Conventions:
        """The first way of passing a call under which the template writes its argument once, as JSON."""
        call = ToolCall("f", '{"a": "b\\"c"}', "call00001")
        chat = [text_message("user", "a"), Message("assistant", (Part("tool_call", call=call),))]
        role = self.plain_conventions.developer
        template = self._templates.get("tool_use", self.main_template)
        for arguments in ("object", "text"):
            for empty in ("missing", "empty", "none"):
                how = Conventions(arguments, empty, role)
                try:
                    text = self._render(template, chat, how, None, False, {}).text
                except DataError:
                    continue
                if r"b\\\"c" not in text and "None" not in text:
                    return how
        return Conventions(developer=role)


def is_trained(messages: Sequence[Message], turn: int, train_on: TrainOn, num_prompt: int) -> bool:
    """Whether an assistant turn is trained. What its message says of itself goes before `train_on`."""
    message = messages[turn]
    if message.train is not None:
        return message.train
    if message.weight == 0:
        return False
    if train_on == "weights":
        return message.weight is not None
    if train_on == "completion":
        return turn >= num_prompt
    return train_on == "all" or all(later.role != "assistant" for later in messages[turn + 1 :])


def _texts(message: Message) -> list[str]:
    calls = message.calls
    return [
        *(part.text for part in message.parts if part.text),
        *(call.name for call in calls),
        *(call.arguments_json for call in calls),
        *(text for text in (message.name, message.tool_call_id) if text),
    ]


def _left_out(rendered: Rendered, messages: Sequence[Message]) -> list[str]:
    seen = {(piece.message, field_of(piece.source)) for piece in pieces_of(rendered) if piece.is_content}
    found = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        for name, field, value in (
            ("content", CONTENT, message.text.strip()),
            ("reasoning", REASONING, (message.reasoning or "").strip()),
        ):
            if value and (index, field) not in seen:
                found.append(f"messages[{index}].{name}")
    return found


def _located(message: str, record: Record, hint: str | None = None) -> DataError:
    source = record.source
    where = Where(file=source.uri, line=source.row) if source else None
    return DataError(message, where=where, hint=hint)
