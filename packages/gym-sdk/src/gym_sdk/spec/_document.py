"""A YAML or JSON text as plain data, with the line of every key and item.

The scalars are those of YAML 1.2's core schema: `2e-4` is a number, `no`, `on` and `1:30` are text. A key that stands
twice is an error. Only plain data: no tags beyond the core ones, no merge keys, no references to oneself.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gym_sdk.errors import SpecError, Where

Path = tuple[str | int, ...]

MAX_NODES = 100_000
"""Aliases of aliases can make a short text unfold without end."""

NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
CORE_SCALARS = (("null", NULL, "~nN\0"), ("bool", BOOL, "tTfF"), ("int", INT, "-+0123456789"), ("float", FLOAT, "-+."))
TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """Plain data, and where each part of it stands."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)
    """The line (from 1) of each key or list item, by its path."""

    def line(self, path: Path) -> int | None:
        """The line of the path, or of the nearest part around it that the text has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


for _name, _pattern, _first in CORE_SCALARS:
    _starts = [character if character != "\0" else "" for character in _first]
    _CoreLoader.add_implicit_resolver(TAG + _name, _pattern, _starts)
_CoreLoader.add_implicit_resolver(TAG + "float", FLOAT, list("0123456789"))


def parse_yaml(text: str, name: str) -> Document:
    """Parse one YAML document; `name` stands for the file in messages. Raises SpecError."""
    loader = _CoreLoader.__new__(_CoreLoader)
    try:
        _CoreLoader.__init__(loader, text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Where(file=name, line=mark.line + 1, column=mark.column + 1) if mark else Where(file=name)
        raise SpecError(f"not valid YAML: {_yaml_problem(error)}", where=where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(
            f"not valid YAML: the character U+{int(error.character):04X} is not allowed",
            where=Where(file=name, line=line),
        ) from None
    except RecursionError:
        raise SpecError("not valid YAML: nested too deeply", where=Where(file=name)) from None
    if root is None:
        return Document(data=None)
    builder = _Builder(name)
    data = builder.build(root, (), ())
    return Document(data=data, lines=builder.lines)


def parse_scalar(text: str) -> Any:
    """The value that a plain scalar has in YAML 1.2's core schema."""
    for name, pattern, _ in CORE_SCALARS:
        if pattern.match(text):
            return _scalar_value(name, text)
    return text


def parse_json(text: str, name: str) -> Document:
    """Parse one JSON document. Raises SpecError."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    lines: dict[Path, int] = {}
    try:
        # The library judges the syntax; the walk below only finds out where things stand.
        data = json.loads(text, parse_constant=refuse, parse_int=_whole)
        _JsonLines(text, name, lines).walk(_skip_space(text, 0), ())
    except json.JSONDecodeError as error:
        raise SpecError(
            f"not valid JSON: {error.msg[0].lower()}{error.msg[1:]}",
            where=Where(file=name, line=error.lineno, column=error.colno),
        ) from None
    except ValueError as error:
        raise SpecError(f"not valid JSON: {error}", where=Where(file=name)) from None
    except RecursionError:
        raise SpecError("not valid JSON: nested too deeply", where=Where(file=name)) from None
    return Document(data=data, lines=lines)


class _Builder:
    """YAML nodes to plain data."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self.num_nodes = 0

    def build(self, node: Node, path: Path, parents: tuple[int, ...]) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise self.error("too large: its references unfold into more than 100,000 values", node)
        if id(node) in parents:
            raise self.error("a reference to itself", node)
        if path not in self.lines:
            self.lines[path] = node.start_mark.line + 1
        inside = (*parents, id(node))
        if isinstance(node, MappingNode) and node.tag == TAG + "map":
            return self.mapping(node, path, inside)
        if isinstance(node, SequenceNode) and node.tag == TAG + "seq":
            return [self.build(item, (*path, index), inside) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        raise self.error(f"the tag {node.tag} is not supported; only plain data is", node)

    def mapping(self, node: MappingNode, path: Path, parents: tuple[int, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise self.error("a key must be text", key_node)
            key, line = key_node.value, key_node.start_mark.line + 1
            if key == "<<" and key_node.style is None:
                raise self.error("merge keys (<<) are not part of YAML 1.2; write the keys out", key_node)
            if key in data:
                raise SpecError(
                    f"{key} stands twice, on lines {first_lines[key]} and {line}",
                    where=Where(file=self.name, line=line, path=format_path((*path, key))),
                    hint="keep one of them",
                )
            first_lines[key] = self.lines[(*path, key)] = line
            data[key] = self.build(value_node, (*path, key), parents)
        return data

    def scalar(self, node: ScalarNode) -> Any:
        kind = node.tag.removeprefix(TAG)
        pattern = {name: pattern for name, pattern, _ in CORE_SCALARS}.get(kind)
        if node.tag == "!" or kind == "str":
            return node.value
        if pattern is None or not pattern.match(node.value):
            raise self.error(f"the tag {node.tag} is not supported here; only plain data is", node)
        try:
            return _scalar_value(kind, node.value)
        except ValueError:
            raise self.error(f"a number of {len(node.value)} digits is too long", node) from None

    def error(self, message: str, node: Node) -> SpecError:
        mark = node.start_mark
        return SpecError(message, where=Where(file=self.name, line=mark.line + 1, column=mark.column + 1))


def parse_path(text: str) -> Path:
    """What `format_path` wrote."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", text))


def format_path(path: Path) -> str:
    """`("data", "train", 0, "source")` as `data.train[0].source`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python reads no more than 4,300 digits
        raise ValueError(f"a number of {len(text)} digits is too long") from None


def _scalar_value(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "cannot be read"
    if "'\\t'" in problem:
        return "a tab where spaces are needed"
    if problem.startswith("but found another document"):
        return "more than one document"
    if "<stream end>" in problem and error.context_mark:
        what = "list" if "sequence" in (error.context or "") else "mapping"
        if what == "list" or "mapping" in (error.context or ""):
            return f"the {what} that begins on line {error.context_mark.line + 1} is not closed"
    if problem == "mapping values are not allowed here":
        return "a `: ` where no key can stand (quote a value that holds one)"
    return f"{error.context}, {problem}" if error.context else problem


_DECODER = json.JSONDecoder()
_SCALAR = re.compile(r"[^\s,\]}]+")


def _skip_space(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\r\n":
        index += 1
    return index


class _JsonLines:
    """Finds out on which line each value of a valid JSON text stands."""

    def __init__(self, text: str, name: str, lines: dict[Path, int]) -> None:
        self.text, self.name, self.lines = text, name, lines
        self.line_ends = [match.start() for match in re.finditer("\n", text)]

    def line(self, index: int) -> int:
        return bisect.bisect_left(self.line_ends, index) + 1

    def walk(self, index: int, path: Path) -> int:
        """Note the lines of the value at `index`; returns the index behind it."""
        text, lines = self.text, self.lines
        lines.setdefault(path, self.line(index))
        if text[index] == '"':
            return _DECODER.raw_decode(text, index)[1]
        if text[index] not in "{[":
            match = _SCALAR.match(text, index)
            return match.end() if match else index
        is_object, position = text[index] == "{", 0
        index = _skip_space(text, index + 1)
        while text[index] not in "}]":
            if is_object:
                line = self.line(index)
                key, index = _DECODER.raw_decode(text, index)
                inner: Path = (*path, key)
                if inner in lines:
                    raise SpecError(
                        f"{key} stands twice, on lines {lines[inner]} and {line}",
                        where=Where(file=self.name, line=line, path=format_path(inner)),
                    )
                lines[inner] = line
                index = _skip_space(text, _skip_space(text, index) + 1)
            else:
                inner = (*path, position)
                position += 1
            index = _skip_space(text, self.walk(index, inner))
            if text[index] == ",":
                index = _skip_space(text, index + 1)
        return index + 1
