"""Running a template once and learning what it does to every chat of the same shape.

A template that only joins, trims and compares its messages does the same to all chats that compare alike. `Recorded`
is a `str` that writes down each operation as a Python expression over the chat's texts (the inputs) and each answer
that the template acted on as a condition. The result is a function of a few lines that gives the rendered text for any
chat that meets the conditions. Whatever cannot be written down raises `Untraceable`; such chats are rendered in full.
"""

# pyright: reportPrivateUsage=false
# Functions of this module belong to `Recorded`; its attributes are private because templates must not see them.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import markupsafe
from jinja2 import nodes


class Untraceable(BaseException):
    """An operation whose result depends on the text in a way that is not written down.

    Not an `Exception`: Jinja's own tests take any of those for the answer "no".
    """


@dataclass(frozen=True, slots=True)
class Text:
    """A stretch of the result: the template's own characters, or an expression over the inputs."""

    value: str
    is_expression: bool


class Recorder:
    """The conditions met so far, as `(expression, answer)`."""

    def __init__(self) -> None:
        self.conditions: dict[str, bool] = {}

    def answer(self, expression: str, value: bool) -> bool:
        """Writes down what the template learnt."""
        self.conditions[expression] = value
        return value

    def input(self, number: int, text: str) -> Recorded:
        """The text of an input."""
        return Recorded.make(text, (Text(f"x{number}", True),), self)


class Recorded(str):
    """A text that comes from the inputs, and how."""

    __slots__ = ("_recorder", "_texts")
    _recorder: Recorder
    _texts: tuple[Text, ...]

    @staticmethod
    def make(text: str, texts: tuple[Text, ...], recorder: Recorder) -> Recorded:
        """A recorded text of known making."""
        made = str.__new__(Recorded, text)
        made._texts = texts
        made._recorder = recorder
        return made

    @property
    def _code(self) -> str:
        return "(" + " + ".join(t.value if t.is_expression else repr(t.value) for t in self._texts) + ")"

    def _made(self, text: str, code: str) -> Recorded:
        return Recorded.make(text, (Text(code, True),), self._recorder)

    def _asked(self, template: str, value: bool) -> bool:
        return self._recorder.answer(template, value)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __bool__(self) -> bool:
        return self._asked(f"{self._code} != ''", str.__len__(self) > 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return self._asked(f"{self._code} == {code_of(other)}", str.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        raise Untraceable("hash")

    def __contains__(self, part: object) -> bool:
        return self._asked(f"{code_of(part)} in {self._code}", str.__contains__(self, part))  # type: ignore[operator]

    def __iter__(self) -> Iterator[str]:
        # Asking for an iterator says nothing about the text (`is iterable`); using it does.
        raise_later: Callable[[], NoReturn] = self._iterated
        return iter(raise_later, None)

    def _iterated(self) -> NoReturn:
        raise Untraceable("iteration")

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):
            parts = [key.start, key.stop, key.step]
            if any(part is not None and type(part) is not int for part in parts):
                raise Untraceable("slice")
            code = ":".join("" if part is None else str(part) for part in parts)
            return self._made(str.__getitem__(self, key), f"{self._code}[{code}]")
        if isinstance(key, str):
            raise TypeError("string indices must be integers")  # `text['type']`, as any text answers
        raise Untraceable("index")

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        arguments = f"{sep!r}, {maxsplit!r}"
        parts = str.split(self, sep, maxsplit)
        self._asked(f"len({self._code}.split({arguments})) == {len(parts)}", True)
        return [self._made(part, f"{self._code}.split({arguments})[{i}]") for i, part in enumerate(parts)]

    def join(self, iterable: Iterable[str], /) -> str:
        pieces: list[str] = []
        for item in iterable:
            pieces += (self, item) if pieces else (item,)
        return concat(pieces)


class RecordedLength(int):
    """The length of a recorded text: comparisons are written down, arithmetic is not possible."""

    _text: Recorded

    def _compared(self, sign: str, other: object, result: bool) -> bool:
        if type(other) is not int:
            raise Untraceable("length")
        return self._text._asked(f"len({self._text._code}) {sign} {other}", result)

    def __lt__(self, other: Any) -> bool:
        return self._compared("<", other, int(self) < other)

    def __le__(self, other: Any) -> bool:
        return self._compared("<=", other, int(self) <= other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(">", other, int(self) > other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(">=", other, int(self) >= other)

    def __eq__(self, other: object) -> bool:
        return self._compared("==", other, int(self) == other)

    def __ne__(self, other: object) -> bool:
        return self._compared("!=", other, int(self) != other)

    def __bool__(self) -> bool:
        return self._compared("!=", 0, int(self) != 0)

    def __hash__(self) -> int:
        raise Untraceable("length")


def length_filter(value: Any) -> int:
    """`length`, of a recorded text as a length that notices what it is compared with."""
    if not isinstance(value, Recorded):
        return len(value)
    length = RecordedLength(str.__len__(value))
    length._text = value
    return length


def safe_filter(value: Any) -> Any:
    """`safe`, which would read recorded texts unnoticed."""
    if isinstance(value, Recorded):
        raise Untraceable("safe")
    return markupsafe.Markup(value)


def code_of(value: object) -> str:
    """The expression of a text, recorded or not."""
    if isinstance(value, Recorded):
        return value._code
    if type(value) is str:
        return repr(value)
    raise Untraceable(f"comparison with {type(value).__name__}")


def _derived(name: str) -> Callable[..., str]:
    """A method whose result is a text."""
    plain = getattr(str, name)

    def method(self: Recorded, *arguments: Any) -> str:
        code = ", ".join("None" if argument is None else _constant(argument) for argument in arguments)
        return self._made(plain(self, *arguments), f"{self._code}.{name}({code})")

    method.__name__ = name
    return method


def _asking(name: str) -> Callable[..., bool]:
    """A method whose result is yes or no."""
    plain = getattr(str, name)

    def method(self: Recorded, *arguments: Any) -> bool:
        code = ", ".join(_constant(argument) for argument in arguments)
        return self._asked(f"{self._code}.{name}({code})", plain(self, *arguments))

    method.__name__ = name
    return method


def _untraceable(name: str) -> Callable[..., NoReturn]:
    def method(self: Recorded, *arguments: Any, **named: Any) -> NoReturn:
        raise Untraceable(name)

    method.__name__ = name
    return method


def _constant(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + "".join(f"{_constant(item)}, " for item in value) + ")"
    if type(value) is int:
        return repr(value)
    return code_of(value)


for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__truediv__", "__mod__",
    "__pow__", "__neg__", "__abs__", "__index__", "__str__", "__repr__", "__format__", "__float__",
):  # fmt: skip
    setattr(RecordedLength, _name, _untraceable(_name))

_DERIVED = {
    "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace", "upper", "lower", "capitalize", "title",
}  # fmt: skip
_ASKING = {"startswith", "endswith"}
_OWN = {
    "split", "join", "__str__", "__add__", "__radd__", "__bool__", "__eq__", "__ne__", "__hash__", "__contains__",
    "__iter__", "__getitem__", "__new__", "__init__", "__class__", "__doc__", "__getattribute__", "__setattr__",
    "__delattr__", "__init_subclass__", "__subclasshook__", "__dir__", "__sizeof__", "__getstate__", "__repr__",
}  # fmt: skip
for _name in {*dir(str), "__rmod__", "__float__", "__int__", "__index__"}:
    if _name in _DERIVED:
        setattr(Recorded, _name, _derived(_name))
    elif _name in _ASKING:
        setattr(Recorded, _name, _asking(_name))
    elif _name not in _OWN:
        setattr(Recorded, _name, _untraceable(_name))


def concat(pieces: Iterable[str]) -> str:
    """`"".join(pieces)`, recorded where a piece is."""
    pieces = tuple(pieces)
    recorder = next((piece._recorder for piece in pieces if isinstance(piece, Recorded)), None)
    text = "".join(pieces)
    if recorder is None:
        return text
    return Recorded.make(text, joined(pieces), recorder)


def joined(pieces: Iterable[str]) -> tuple[Text, ...]:
    """The stretches of several texts; neighbours that the template wrote become one."""
    texts: list[Text] = []
    for piece in pieces:
        for text in piece._texts if isinstance(piece, Recorded) else (Text(piece, False),):
            if texts and not text.is_expression and not texts[-1].is_expression:
                texts[-1] = Text(texts[-1].value + text.value, False)
            elif text.value:
                texts.append(text)
    return tuple(texts)


def contains(part: Any, whole: Any) -> bool:
    """`part in whole`, where a plain text may be asked for a recorded one."""
    if isinstance(whole, str) and not isinstance(whole, Recorded) and isinstance(part, Recorded):
        return part._asked(f"{part._code} in {whole!r}", str.__contains__(whole, part))
    return part in whole


SAFE_FILTERS = {
    "trim", "length", "count", "string", "join", "replace", "upper", "lower", "capitalize", "tojson", "first", "last",
    "items", "dictsort", "default", "d", "list", "safe", "map", "select", "reject", "selectattr", "rejectattr",
    "reverse",
}  # fmt: skip
SAFE_TESTS = {
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer",
    "float", "boolean", "true", "false", "eq", "equalto", "==", "ne", "!=", "in", "sameas", "callable",
    "odd", "even", "divisibleby",
}  # fmt: skip


def is_followable(tree: nodes.Template) -> bool:
    """Whether the template uses only filters and tests whose effect on a text `Recorded` notices."""
    filters = {node.name for node in tree.find_all(nodes.Filter)}
    tests = {node.name for node in tree.find_all(nodes.Test)}
    for node in tree.find_all(nodes.Filter):
        # `map('upper')` and `selectattr('role', 'in', ...)` name a filter or test by a constant.
        named = [part.value for part in node.args if isinstance(part, nodes.Const) and isinstance(part.value, str)]
        if node.name == "map":
            filters.update(named)
        elif node.name in ("select", "reject"):
            tests.update(named[:1])
        elif node.name in ("selectattr", "rejectattr"):
            tests.update(named[1:2])
    formats = any(node.attr in ("format", "format_map") for node in tree.find_all(nodes.Getattr)) or any(
        isinstance(node.left, nodes.Const) and isinstance(node.left.value, str) for node in tree.find_all(nodes.Mod)
    )
    chained = any(
        len(node.ops) > 1 and any(part.op in ("in", "notin") for part in node.ops)
        for node in tree.find_all(nodes.Compare)
    )
    return filters <= SAFE_FILTERS and tests <= SAFE_TESTS and not formats and not chained


def tojson_filter(value: Any, **options: Any) -> str:
    """`tojson`, which would read recorded texts unnoticed."""
    if _holds_recorded(value):
        raise Untraceable("tojson")
    from gym_data.rendering.template import tojson

    return tojson(value, **options)


def _holds_recorded(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_recorded(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return any(map(_holds_recorded, value))
    return isinstance(value, Recorded)


@jinja2.pass_environment
def join_filter(environment: jinja2.Environment, value: Any, d: str = "", attribute: Any = None) -> str:
    """Jinja's `join`, which would read recorded texts unnoticed."""
    if attribute is not None:
        raise Untraceable("join with an attribute")
    pieces: list[str] = []
    for item in value:
        pieces += (d, str(item)) if pieces else (str(item),)
    return concat(pieces)


class Program:
    """What a template does to chats of one shape: conditions on their texts, and the rendered text where they hold."""

    def __init__(self, num_inputs: int, conditions: dict[str, bool], texts: Sequence[Text]) -> None:
        self.texts: tuple[Text, ...] = tuple(texts)
        checks = "".join(
            f"    if {'not ' if wanted else ''}({code}): return None\n" for code, wanted in conditions.items()
        )
        pieces = ", ".join(t.value if t.is_expression else repr(t.value) for t in texts)
        names = "".join(f"x{i}, " for i in range(num_inputs))
        source = f"def render(x):\n    {names or '_'}= x\n{checks}    return ''.join(({pieces},))\n"
        scope: dict[str, Any] = {"__builtins__": {"len": len}}
        exec(compile(source, "<chat template>", "exec"), scope)
        self.render: Callable[[Sequence[str]], str | None] = scope["render"]
