"""An Ollama Modelfile for a GGUF file: the chat template of training in Ollama's own language, and the stop tokens.

Ollama does not run the Jinja template inside a GGUF file; it has templates of Go. What training's template writes
around each role's text is found by rendering marked conversations, and the result is compared with the training
renderer on conversations of every shape. A template that such parts cannot express (tools, reasoning, dates) is left
out, and the file says so.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from gym_data import ChatRenderer
from gym_sdk.errors import GymError
from gym_trainer.exporting.folder import Base
from gym_trainer.records import write_text

_MARK = "\N{WHITE SQUARE CONTAINING BLACK SMALL SQUARE}"

Chat = tuple[tuple[str, str], ...]
"""Role and text of each message."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a template writes around the texts."""

    start: str
    """Before everything, when the first message is no system message: often a default system turn."""
    before: dict[str, str]
    after: dict[str, str]
    prompt: str
    """Before the answer."""

    def render(self, chat: Chat) -> str:
        """A conversation with a prompt for the next answer, as Ollama will write it."""
        start = "" if chat[0][0] == "system" else self.start
        return start + "".join(self.before[role] + text + self.after[role] for role, text in chat) + self.prompt


def write_modelfile(path: Path, gguf: Path, base: Base) -> bool:
    """Write a Modelfile beside the GGUF file; returns whether it has the template."""
    surroundings = surroundings_of(base.renderer)
    bos = base.tokenizer.named_tokens.get("bos_token", "") if base.tokenizer.adds_bos else ""
    lines = [f"FROM ./{gguf.name}"]
    if surroundings is not None:
        lines.append(f'TEMPLATE """{go_template(surroundings, bos)}"""')
    else:
        lines.append(
            "# The chat template of training cannot be written in Ollama's language. The GGUF file holds it as"
        )
        lines.append("# Jinja, which llama.cpp's server runs (--jinja); Ollama will guess a template.")
    for id_ in base.renderer.stop_ids:
        lines.append(f"PARAMETER stop {json.dumps(base.tokenizer.decode([id_]), ensure_ascii=False)}")
    write_text(path, "\n".join(lines) + "\n")
    return surroundings is not None


def surroundings_of(renderer: ChatRenderer) -> Surroundings | None:
    """What the template writes around texts, or None where that is not all it does."""
    try:
        found = _find(renderer)
        for chat in _conversations():
            if found.render(chat) != _rendered(renderer, chat):
                return None
    except (GymError, ValueError):
        return None
    return found


def go_template(surroundings: Surroundings, bos: str = "") -> str:
    """The same in Go's template language. `bos` is left out where the reader adds it to every prompt."""

    def quoted(text: str) -> str:
        return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""

    roles = [role for role in ("system", "user", "assistant") if role in surroundings.before]
    first = {role: surroundings.before[role] for role in roles}
    start = surroundings.start.removeprefix(bos)
    parts = [f'{{{{ if ne (index .Messages 0).Role "system" }}}}{quoted(start)}{{{{ end }}}}'] if start else []
    parts.append("{{ range .Messages }}")
    for number, role in enumerate(roles):
        keyword = "if" if number == 0 else "else if"
        before, after = (
            quoted(first[role].removeprefix(bos) if role == "system" else first[role]),
            quoted(surroundings.after[role]),
        )
        parts.append(f'{{{{ {keyword} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
    parts.append("{{ end }}{{ end }}" + quoted(surroundings.prompt))
    return "".join(parts)


def _find(renderer: ChatRenderer) -> Surroundings:
    """From two marked conversations, with and without a system message."""
    talk = (("user", f"{_MARK}u"), ("assistant", f"{_MARK}a"), ("user", f"{_MARK}w"))
    text = _rendered(renderer, talk)
    opening, rest = text.split(f"{_MARK}u")
    between, rest = rest.split(f"{_MARK}a")
    middle, closing = rest.split(f"{_MARK}w")
    # `between` ends the user's turn and opens the assistant's, as `closing` does; `middle` ends the assistant's turn
    # and opens the user's. What opens the user's turn is the common end of `middle` and `opening`; what ends it is what
    # ends the assistant's, where there is such a thing.
    if between != closing:
        raise ValueError("the answer opens in another way than its prompt")
    before_user = _common_end(middle, opening)
    after_assistant = middle.removesuffix(before_user)
    after_user = after_assistant if between.startswith(after_assistant) else ""
    prompt = between.removeprefix(after_user)
    before = {"user": before_user, "assistant": prompt}
    after = {"user": after_user, "assistant": after_assistant}
    start = opening.removesuffix(before_user)
    try:
        with_system = _rendered(renderer, (("system", f"{_MARK}s"), *talk))
        before_system, rest = with_system.split(f"{_MARK}s")
        after_system = rest.split(f"{_MARK}u")[0].removesuffix(before_user)
        before["system"], after["system"] = before_system, after_system
    except (GymError, ValueError):
        pass  # a template without system turns
    return Surroundings(start=start, before=before, after=after, prompt=prompt)


def _conversations() -> list[Chat]:
    texts = ("How many zebras?", "Two.\n\nOr three: ¿quién sabe?", "  spaced  ", "{{ braces }}")
    chats: list[Chat] = []
    for system, turns in itertools.product((False, True), (1, 2, 3)):
        roles = ["user", "assistant"] * turns
        chat = tuple((role, texts[i % len(texts)].strip()) for i, role in enumerate(roles[:-1]))
        chats.append((("system", "Answer in one line."), *chat) if system else chat)
    return chats


def _rendered(renderer: ChatRenderer, chat: Chat) -> str:
    messages = [{"role": role, "content": text} for role, text in chat]
    variables = {**renderer.options, "documents": None, "add_generation_prompt": True}
    return renderer.main_template.render_plain(messages, **variables, tools=None)


def _common_end(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]
