"""Experience libraries: short lessons put in front of a model, as training-free GRPO writes them.

    experience/
      library.yaml       the lessons and where in the prompt they stand; made to be read, edited and merged by hand
      provenance.json    by content id: questions, rollouts and operations that a lesson came from, counts, worth
      manifest.json      base model, digests, measured accuracy
      versions/          every accepted library, 0000.yaml first

A library acts like an adapter of its base model: `place` puts it into the messages of a request, in training,
evaluation, chat and the daemon alike, so that what was measured is what is served.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gym_data.record import Message, Part, text_message
from gym_sdk.errors import DataError, Where

if TYPE_CHECKING:
    import yaml

FORMAT = "gym-experience/1"
LIBRARY_FILE, PROVENANCE_FILE, MANIFEST_FILE, VERSIONS_FOLDER = (
    "library.yaml",
    "provenance.json",
    "manifest.json",
    "versions",
)

Placement = Literal["system", "user"]
"""`system`: in the system message, at its end. `user`: at the end of the last user message, after the question."""

DEFAULT_HEADING = (
    "Experiences from earlier attempts at questions like these. Use those that fit the question and ignore the rest:"
)
MAX_FILE_BYTES = 1_000_000
_KEYS = ("format", "placement", "heading", "experiences")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One lesson: a short name and a sentence."""

    name: str
    text: str

    @property
    def id(self) -> str:
        """Of the content, whatever its spacing: an edited lesson is another one."""
        content = "\0".join(" ".join(part.split()) for part in (self.name, self.text))
        return "x" + hashlib.sha256(content.encode()).hexdigest()[:10]


@dataclass(frozen=True, kw_only=True)
class ExperienceLibrary:
    """Lessons in the order in which the model reads them."""

    items: tuple[Experience, ...] = ()
    placement: Placement = "system"
    heading: str = DEFAULT_HEADING

    @property
    def sha256(self) -> str:
        """Of everything that reaches the prompt."""
        return hashlib.sha256(f"{self.placement}\0{self.render()}".encode()).hexdigest()

    @property
    def num_tokens_estimate(self) -> int:
        """The length of the rendered text at four UTF-8 bytes a token: no tokenizer is at hand before an endpoint."""
        return estimate_tokens(self.render())

    def render(self) -> str:
        """The text that stands in the prompt; empty without items."""
        if not self.items:
            return ""
        lines = [f"[{number}] {item.name}: {item.text}" for number, item in enumerate(self.items, 1)]
        return "\n".join([self.heading, *lines] if self.heading else lines)

    def place(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Chat messages in OpenAI's form with the library in its place. `messages` are not changed.

        `system` adds to the first message when that is a system or developer message, and begins with a system
        message otherwise. `user` adds to the last user message, and raises ValueError where there is none.
        """
        placed = [dict(message) for message in messages]
        text = self.render()
        if not text:
            return placed
        index = self._index([message.get("role") for message in placed])
        if index is None:
            return [{"role": "system", "content": text}, *placed]
        placed[index]["content"] = _append(placed[index].get("content"), text)
        return placed

    def place_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The same for messages in the canonical form, which servers hold: converting what `place` gives and placing
        what was converted are one. Raises ValueError as `place` does."""
        text = self.render()
        if not text:
            return list(messages)
        index = self._index([message.role for message in messages])
        if index is None:
            return [text_message("system", text), *messages]
        message = messages[index]
        *before, last = message.parts or (Part("text", ""),)
        if last.type == "text":
            parts = (*before, Part("text", _joined(last.text, text)))
        else:
            parts = (*message.parts, Part("text", text))
        return [*messages[:index], message._replace(parts=parts), *messages[index + 1 :]]

    def _index(self, roles: Sequence[object]) -> int | None:
        """The message that the text is added to; None for a system message of its own, in front."""
        if self.placement == "system":
            return 0 if roles and roles[0] in ("system", "developer") else None
        for index in reversed(range(len(roles))):
            if roles[index] == "user":
                return index
        raise ValueError("a library placed in the user message needs a request with a user message")

    def without(self, item_id: str) -> ExperienceLibrary:
        """The library less one item."""
        return replace(self, items=tuple(item for item in self.items if item.id != item_id))

    def merged_with(self, other: ExperienceLibrary) -> ExperienceLibrary:
        """These items, then those of `other` whose content is not here yet; placement and heading stay."""
        here = {item.id for item in self.items}
        return replace(self, items=self.items + tuple(item for item in other.items if item.id not in here))

    def to_yaml(self) -> str:
        """The file's text; `parse_library` gives back an equal library."""
        import yaml

        data = {
            "format": FORMAT,
            "placement": self.placement,
            "heading": self.heading,
            "experiences": [{"name": item.name, "text": item.text} for item in self.items],
        }
        body = yaml.safe_dump(data, allow_unicode=True, sort_keys=False, width=100)
        return (
            "# Lessons that Gym puts into the prompt. Edit, add, delete or reorder them freely; each needs a name and\n"
            "# a text. placement is system (end of the system message) or user (after the question).\n" + body
        )


def estimate_tokens(text: str) -> int:
    """Four UTF-8 bytes a token, rounded up: near enough for English, too many for scripts with dense tokens."""
    return -(-len(text.encode()) // 4)


def read_library(path: str | os.PathLike[str]) -> ExperienceLibrary:
    """Read an experience folder or a library file. Raises DataError with file and line."""
    file = Path(path)
    if file.is_dir():
        file = file / LIBRARY_FILE
    where = Where(file=str(file))
    try:
        raw = file.read_bytes()
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError("there is no such experience library", where=where) from None
    except UnicodeDecodeError:
        raise DataError("not UTF-8 text", where=where, hint="save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=where) from None
    if len(raw) > MAX_FILE_BYTES:
        raise DataError(f"has {len(raw)} bytes; a library has at most {MAX_FILE_BYTES}", where=where)
    return parse_library(text, file=str(file))


def parse_library(text: str, *, file: str = "library.yaml") -> ExperienceLibrary:
    """Read a library's text. Raises DataError with file, line and what is wrong."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise DataError(f"not valid YAML: {problem}", where=Where(file=file, line=line)) from None
    reader = _Reader(file)
    fields = reader.mapping(root, "an experience library", _KEYS)
    found = reader.text(fields, root, "format", required=True)
    if found != FORMAT:
        raise reader.fault(fields["format"], f"format is {found!r}; this gym reads {FORMAT!r}")
    placement = reader.text(fields, root, "placement", default="system")
    if placement not in ("system", "user"):
        raise reader.fault(fields["placement"], f"placement is {placement!r}; it must be system or user")
    heading = reader.text(fields, root, "heading", default=DEFAULT_HEADING, empty=True)
    items: dict[str, Experience] = {}
    for node in reader.sequence(fields, root, "experiences"):
        entry = reader.mapping(node, "an experience", ("name", "text"))
        name, lesson = (" ".join(reader.text(entry, node, key, required=True).split()) for key in ("name", "text"))
        item = Experience(name=name, text=lesson)
        if item.id in items:
            raise reader.fault(node, f"the experience {name!r} stands here a second time", hint="delete one of them")
        items[item.id] = item
    return ExperienceLibrary(items=tuple(items.values()), placement=placement, heading=heading)


def write_library(library: ExperienceLibrary, path: str | os.PathLike[str]) -> None:
    """Write a library's file whole: a reader sees the old one or the new one."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.tmp")
    with draft.open("wb") as file:
        file.write(library.to_yaml().encode())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)


class _Reader:
    """Walks composed YAML, so that every message knows its line."""

    def __init__(self, file: str) -> None:
        self._file = file

    def fault(self, node: yaml.Node | None, message: str, *, hint: str | None = None) -> DataError:
        line = node.start_mark.line + 1 if node is not None else None
        return DataError(message, where=Where(file=self._file, line=line), hint=hint)

    def mapping(self, node: yaml.Node | None, what: str, keys: tuple[str, ...]) -> dict[str, yaml.Node]:
        import yaml

        if not isinstance(node, yaml.MappingNode):
            raise self.fault(node, f"{what} is a mapping with the keys {', '.join(keys)}")
        fields: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.value not in keys:
                raise self.fault(key, f"{what} has no key {key.value!r}; its keys are {', '.join(keys)}")
            if key.value in fields:
                raise self.fault(key, f"the key {key.value!r} stands here a second time")
            fields[key.value] = value
        return fields

    def text(
        self,
        fields: dict[str, yaml.Node],
        parent: yaml.Node | None,
        key: str,
        *,
        required: bool = False,
        default: str = "",
        empty: bool = False,
    ) -> str:
        import yaml

        node = fields.get(key)
        if node is None:
            if required:
                raise self.fault(parent, f"the key {key!r} is missing")
            return default
        if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
            raise self.fault(node, f"{key} must be text")
        if not node.value.strip() and not empty:
            raise self.fault(node, f"{key} is empty")
        return node.value

    def sequence(self, fields: dict[str, yaml.Node], parent: yaml.Node | None, key: str) -> list[yaml.Node]:
        import yaml

        node = fields.get(key)
        if node is None:
            raise self.fault(parent, f"the key {key!r} is missing")
        if not isinstance(node, yaml.SequenceNode):
            raise self.fault(node, f"{key} must be a list")
        return node.value


def _append(content: Any, text: str) -> Any:
    """Text at the end of a message's content, a string or a list of typed parts."""
    if not isinstance(content, list):
        return _joined(content, text)
    parts: list[Any] = content
    last = parts[-1] if parts else None
    if isinstance(last, str):
        return [*parts[:-1], _joined(last, text)]
    if isinstance(last, dict) and last.get("type") in _TEXT_PARTS:
        return [*parts[:-1], {**last, "text": _joined(last.get("text"), text)}]
    return [*parts, {"type": "text", "text": text}]


def _joined(before: str | None, text: str) -> str:
    return f"{before}\n\n{text}" if before else text
