"""Data sets by their name in a `dataset_info.json`, as LLaMA-Factory keeps them: `data/dataset_info.json#alpaca_demo`.

An entry says where the rows are and what their columns and speakers are called. It becomes a source like any other:
`ranking`, `kto_tag`, `images` and the rest are the columns of Gym's `alpaca` and `sharegpt` formats under the same
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gym_data._json import dumps, loads
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSource

MARK = "dataset_info.json#"
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_SHAREGPT = {"messages": "conversations"}
_OPENAI = {"messages": "messages"}
_KNOWN = {
    "file_name", "hf_hub_url", "cloud_file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples",
    "columns", "tags", "ms_hub_url", "om_hub_url",
}  # fmt: skip
_ROLES = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""The speakers of ShareGPT by LLaMA-Factory's names for them."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What the turns of a data set call their speaker, their text, and each kind of speaker."""

    columns: frozenset[str]
    """Where turns stand in a row."""
    role: str
    content: str
    speakers: dict[str, str]

    def retagged(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with its turns under ShareGPT's names."""
        return {key: self._turns(value) if key in self.columns else value for key, value in row.items()}

    def _turns(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._turns(turn) for turn in value]
        if not (isinstance(value, dict) and self.role in value and self.content in value):
            return value  # not a turn: the format says what is wrong with it
        rest = {key: item for key, item in value.items() if key not in (self.role, self.content)}
        speaker = value[self.role]
        return {"from": self.speakers.get(speaker, speaker), "value": value[self.content], **rest}


@dataclass(frozen=True, slots=True)
class Described:
    """A source as its entry describes it."""

    source: DataSource
    tags: Tags | None = None
    entry_json: str = ""
    """The entry itself, which is an input of the preparation."""


def described(source: DataSource) -> Described:
    """The source that a name in a `dataset_info.json` stands for; any other source as it is. Raises DataError."""
    if MARK not in source.source:
        return Described(source)
    path, _, name = source.source.partition("#")
    entry = _entry(Path(path).expanduser(), name)
    where = Where(file=path, path=name)
    if unknown := entry.keys() - _KNOWN:
        raise DataError(f"the entry has settings that Gym does not know: {', '.join(sorted(unknown))}", where=where)
    formatting = entry.get("formatting", "alpaca")
    columns = {key: value for key, value in (entry.get("columns") or {}).items() if value is not None}
    if formatting == "alpaca" and set(columns) == {"prompt"}:
        shape, names = "text", {"prompt": "text"}
    elif formatting in ("alpaca", "sharegpt", "openai"):
        shape, names = formatting, {"alpaca": _ALPACA, "sharegpt": _SHAREGPT, "openai": _OPENAI}[formatting]
    else:
        raise DataError(f"unknown formatting {formatting!r}", where=where, hint="Known: alpaca, sharegpt, openai.")
    tags = entry.get("tags") or {}
    if formatting == "sharegpt" and _is_openai(tags) and not {"chosen", "rejected", "kto_tag"} & columns.keys():
        shape, names, tags = "openai", _OPENAI, {}
    # Entries that name some columns leave the others under their usual names.
    usual = {name: name for name in names.values()} if columns else {}
    mapped = usual | {names.get(key, key): column for key, column in columns.items()}
    if entry.get("ranking") and not {"chosen", "rejected"} <= mapped.keys():
        raise DataError("ranking needs the columns chosen and rejected", where=where)
    return Described(
        source.model_copy(
            update={
                "source": _rows_of(entry, Path(path).expanduser().parent, where),
                "format": shape,
                "columns": mapped | source.columns,
                "split": entry.get("split") or source.split,
                "limit": source.limit or entry.get("num_samples"),
            }
        ),
        _tags(tags, columns) if formatting == "sharegpt" and tags else None,
        dumps(entry),
    )


def _entry(path: Path, name: str) -> dict[str, Any]:
    try:
        entries = loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=Where(file=str(path))) from None
    except ValueError as error:
        raise DataError(f"not valid JSON: {error}", where=Where(file=str(path))) from None
    entry = entries.get(name) if isinstance(entries, dict) else None
    if not isinstance(entry, dict):
        near = get_close_matches(name, entries, 1)
        raise DataError(
            f"there is no data set {name!r}",
            where=Where(file=str(path)),
            hint=f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(map(repr, list(entries)[:20]))}.",
        )
    return entry


def _rows_of(entry: dict[str, Any], folder: Path, where: Where) -> str:
    """Where the rows are, as Gym names sources."""
    if name := entry.get("file_name"):
        return str(folder / name)
    if address := entry.get("cloud_file_name"):
        return str(address)
    if hub := entry.get("hf_hub_url"):
        subset = entry.get("subset") or entry.get("folder")
        return f"hub:{hub}" + (f"/{subset}" if subset else "")
    raise DataError("the entry names no file_name, cloud_file_name or hf_hub_url", where=where)


def _tags(tags: dict[str, str], columns: dict[str, str]) -> Tags:
    turns = {
        columns.get("messages", "conversations"),
        columns.get("chosen", "chosen"),
        columns.get("rejected", "rejected"),
    }
    speakers = {tags[key]: speaker for key, speaker in _ROLES.items() if key in tags}
    return Tags(frozenset(turns), tags.get("role_tag", "from"), tags.get("content_tag", "value"), speakers)


def _is_openai(tags: dict[str, str]) -> bool:
    """Whether turns are OpenAI's messages, which LLaMA-Factory reads as ShareGPT with other names."""
    own = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    return all(tags.get(key) == value for key, value in own.items()) and tags.get("system_tag", "system") == "system"
