"""A model's chat template, compiled twice: plain, as transformers runs it, and traced.

The traced program is the same Jinja syntax tree with every string constant replaced by a `Traced` one and every join by
one that keeps origins. Both see the same values, so their texts are equal; `render` checks it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gym_data.rendering import recorded
from gym_data.rendering.traced import (
    TEMPLATE,
    UNKNOWN,
    Run,
    Traced,
    concat,
    marked,
    runs_of,
    sources_in,
    wrap,
)
from gym_sdk.errors import DataError

_CLOCK = "strftime_now"
"""The function by which a template asks for the date."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat and where its characters came from: `runs` are `(length, origin)`, and cover the text."""

    text: str
    runs: tuple[Run, ...]


class TemplateFailed(Exception):
    """The template refused these messages, or broke on them."""


class ChatTemplate:
    """A chat template of a given name (for messages) and source."""

    def __init__(
        self,
        source: str,
        *,
        name: str = "chat template",
        tokens: Mapping[str, str] | None = None,
        now: datetime | None = None,
    ) -> None:
        """`tokens` are the tokenizer's own (`bos_token`, ...), which the template may write.

        `now` is what its `strftime_now` tells; the time of each rendering when not given.
        """
        self.source = source
        self.name = name
        self._tokens = dict(tokens or {})
        self._now = now
        self._traced_tokens = wrap(self._tokens, TEMPLATE)
        try:
            environment = _PlainEnvironment(now)
            self._plain = environment.from_string(source)
            self._traced = _TracedEnvironment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{name} is not valid Jinja (line {error.lineno}): {error.message}",
                hint="The model folder's chat_template.jinja is broken; set data.chat_template to a working one.",
            ) from None
        self.marks_generation: bool = environment.marks_generation

    def render_plain(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The text that transformers' `apply_chat_template(tokenize=False)` gives."""
        return self._run(lambda: "".join(self._plain.generate(messages=messages, **{**self._tokens, **variables})))

    def render_traced(self, messages: list[dict[str, Any]], **variables: Any) -> Rendered:
        """The same text with origins, from messages whose strings are traced."""
        tokens = self._traced_tokens
        joined = self._run(
            lambda: concat(map(str, self._traced.generate(messages=messages, **{**tokens, **variables})))
        )
        return Rendered(str.__str__(joined), runs_of(joined))

    @cached_property
    def can_be_followed(self) -> bool:
        """Whether what the template does to a chat can be recorded."""
        return recorded.is_followable(self._plain.environment.parse(self.source))

    @cached_property
    def constants(self) -> list[str]:
        """Every text that stands in the template."""
        environment = self._traced.environment
        assert isinstance(environment, _TracedEnvironment)
        return [str.__str__(text) for text in environment.constants]

    def render_recorded(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The same text as a `Recorded` one. Raises `Untraceable`."""
        variables = {**self._tokens, **variables}
        return self._run(lambda: recorded.concat(map(str, self._recording.generate(messages=messages, **variables))))

    @cached_property
    def _recording(self) -> jinja2.Template:
        return _RecordingEnvironment(self._now).from_string(self.source)

    def _run(self, render: Callable[[], str]) -> str:
        try:
            return render()
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"{self.name}: {error.message or error}") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template is a program: a message that it did not foresee breaks it in any of these ways.
            raise TemplateFailed(f"{self.name} breaks on this chat: {error}") from None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def clock_readings(source: str, now: datetime) -> list[str]:
    """What a template's `strftime_now` calls give at a moment: two moments with equal readings render alike."""
    if _CLOCK not in source:
        return []
    try:
        tree = _PlainEnvironment(now).parse(source)
    except jinja2.TemplateSyntaxError:
        return []  # reported where the template is used
    calls = [call for call in tree.find_all(nodes.Call) if _is_named(call.node, _CLOCK)]
    patterns = [arg.value for call in calls for arg in call.args if isinstance(arg, nodes.Const)]
    num_uses = sum(_is_named(name, _CLOCK) for name in tree.find_all(nodes.Name))
    num_asked_for = sum(_is_named(test.node, _CLOCK) for test in tree.find_all(nodes.Test) if test.name == "defined")
    if len(patterns) != num_uses - num_asked_for:
        return [now.isoformat()]  # a pattern that is computed may ask for anything
    return [now.strftime(str(pattern)) for pattern in patterns]


def _is_named(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _clock(now: datetime | None) -> Callable[[str], str]:
    return lambda pattern: (now or datetime.now()).strftime(pattern)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text as transformers' filter writes it; Jinja's own escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _traced_tojson(value: Any, **options: Any) -> str:
    sources = sources_in(value) - {TEMPLATE}
    return Traced.of(tojson(value, **options), sources.pop() if len(sources) == 1 else UNKNOWN)


class _Dict:
    """`dict(...)` for templates: a function, so that no attribute of the class can be reached."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that takes no underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no underscored name: {name!r}")


class _Generation(Extension):
    """`{% generation %}`: transformers' tag around what the assistant writes."""

    tags = {"generation"}
    environment: _PlainEnvironment

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.marks_generation = True
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        written = caller()
        return marked(written) if isinstance(written, Traced) else written


class _PlainEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates; one environment a template."""

    marks_generation = False
    """Whether the template has a `{% generation %}` block."""

    def __init__(self, now: datetime | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = tojson
        names: dict[str, Any] = {
            "raise_exception": _raise_exception,
            _CLOCK: _clock(now),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self.globals.update(names)


class _JoiningCodeGenerator(CodeGenerator):
    """Writes every join through the environment's own."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - named after the node
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _TracingCodeGenerator(_JoiningCodeGenerator):
    """Writes string constants as look-ups of traced strings."""

    environment: _TracedEnvironment

    def _traced(self, text: str) -> str:
        return f"environment.constants[{self.environment.constant(text)}]"

    def _output_const_repr(self, group: Any) -> str:
        return self._traced("".join(group))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802 - named after the node
        if type(node.value) is str:
            self.write(self._traced(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802 - named after the node
        self.write(self._traced(node.data))


class _TracedEnvironment(_PlainEnvironment):
    """The same environment, with origins kept by constants, joins and filters."""

    code_generator_class = _TracingCodeGenerator
    concat = staticmethod(concat)

    def __init__(self, now: datetime | None) -> None:
        super().__init__(now)
        self.constants: list[str] = []
        self._constant_index: dict[str, int] = {}
        filters: dict[str, Any] = {"join": _join, "tojson": _traced_tojson}
        self.filters.update(filters)
        tell = _clock(now)
        names: dict[str, Any] = {_CLOCK: lambda pattern: Traced.of(tell(pattern), TEMPLATE)}
        self.globals.update(names)

    def constant(self, text: str) -> int:
        """The index of a traced constant."""
        if text not in self._constant_index:
            self._constant_index[text] = len(self.constants)
            self.constants.append(Traced.of(text, TEMPLATE))
        return self._constant_index[text]


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    separator = d if isinstance(d, Traced) else Traced.of(d, TEMPLATE)
    return separator.join(map(str, value))


class _RecordingCodeGenerator(_JoiningCodeGenerator):
    """Writes `in` as a call, so that a recorded text on its left is noticed."""

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - named after the node
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            super().visit_Compare(node, frame)
            return
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.contains(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write("))")


class _RecordingEnvironment(_PlainEnvironment):
    """The same environment, with operations on texts written down."""

    code_generator_class = _RecordingCodeGenerator
    concat = staticmethod(recorded.concat)
    contains = staticmethod(recorded.contains)

    def __init__(self, now: datetime | None) -> None:
        super().__init__(now)
        filters: dict[str, Any] = {
            "join": recorded.join_filter,
            "tojson": recorded.tojson_filter,
            "safe": recorded.safe_filter,
            "length": recorded.length_filter,
            "count": recorded.length_filter,
        }
        self.filters.update(filters)
        self.tests["in"] = recorded.contains
