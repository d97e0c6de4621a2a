"""Rows on a page that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gym_data.report import Sample

_STYLE = """
:root {
  color-scheme: light dark;
  --back: #fff; --text: #1c2024; --dim: #5f6771; --line: #e2e5e9; --mark: #c9f0d3; --edge: #2f9e55;
}
@media (prefers-color-scheme: dark) {
  :root { --back: #15181b; --text: #e6e8ea; --dim: #98a1ab; --line: #2b3137; --mark: #17492b; --edge: #4cc27a; }
}
body {
  font: 16px/1.5 system-ui, sans-serif; background: var(--back); color: var(--text);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.3rem; margin-bottom: .25rem; overflow-wrap: anywhere; }
.key, .place { color: var(--dim); }
section { border-top: 1px solid var(--line); padding: 1rem 0; }
h2 { font-size: 1rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.place { font-weight: normal; }
pre {
  font: 14px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 0; color: var(--dim);
}
mark {
  background: var(--mark); color: var(--text); border-radius: 3px; box-shadow: inset 0 -2px var(--edge);
  -webkit-box-decoration-break: clone; box-decoration-break: clone; padding: 1px 0;
}
.end { color: var(--dim); user-select: none; }
""".strip()


def page(samples: Sequence[Sample], *, title: str) -> str:
    """The page. Trained text is marked by colour and by a line under it."""
    rows = "\n".join(_row(number, sample) for number, sample in enumerate(samples, 1))
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n<main>\n<h1>{escape(title)}</h1>\n"
        '<p class="key">The model is trained to write the <mark>marked text</mark>; it is given the rest. '
        "↵ is a line break within a mark.</p>\n"
        f"{rows}\n</main>\n</html>\n"
    )


def _row(number: int, sample: Sample) -> str:
    trained = sum(len(token.text) for token in sample.tokens if token.trained)
    every = sum(len(token.text) for token in sample.tokens) or 1
    body = "".join(_stretch(token.text) if token.trained else escape(token.text) for token in sample.tokens)
    return (
        f'<section>\n<h2>Row {number} <span class="place">{escape(sample.place)}, '
        f"{trained / every:.0%} of its characters trained</span></h2>\n<pre>{body}</pre>\n</section>"
    )


def _stretch(text: str) -> str:
    return "<mark>" + escape(text).replace("\n", '<span class="end">↵</span>\n') + "</mark>"
