"""`data:` where rows come from and which of their tokens are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import FilePath, SpecModel


class DataSource(SpecModel):
    """One file, folder or data set of rows."""

    source: Annotated[str, Field(min_length=1, examples=["data/train.jsonl"]), FilePath()]
    """A file, a glob (`data/*.jsonl.gz`), a folder (every data file in it), a data set of the hub (`hub:owner/name`),
    or a URL. Files are jsonl, json, csv, tsv, parquet, arrow, txt and md, also with `.gz` and `.zst`. A relative path
    is taken from the folder of the spec's file. On a daemon also `file:ID`, an upload."""

    format: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = "auto"
    """The shape of the rows: `openai`, `openai_preference`, `openai_reinforcement`, `sharegpt`, `alpaca`,
    `prompt_completion`, `preference`, `unpaired`, `stepwise`, `prompt`, `text`, `tokens`, or one that an installed
    package adds. `auto` looks at every row and stops when two shapes are mixed."""

    columns: Annotated[dict[str, str], Field(examples=[{"prompt": "question", "completion": "answer"}])] = {}
    """The file's columns by the format's names: `{prompt: question, completion: answer}`. A value may be a path into
    nested columns: `output.text`, `turns[0].value`, `instances[].output` (the only element)."""

    split: Annotated[str, Field(min_length=1)] = "train"
    """The split of a data set of the hub."""

    encoding: Annotated[str, Field(min_length=1, examples=["cp1252"])] = "utf-8"
    """How the text of csv, tsv, txt and md files is stored, such as `cp1252` for an older spreadsheet's. UTF-16 that
    says so at its start is recognised. JSON is always UTF-8."""

    revision: str | None = None
    """The revision of a data set of the hub; its newest when not given."""

    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows, counted before any shuffling."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often the training rows are seen in an epoch: 2 twice, 0.5 a random half. Applied after the evaluation rows
    are held out. While streaming, how often the source is drawn from, compared with the others."""


class EvalSplit(SpecModel):
    """Held-out rows that give the evaluation loss."""

    split: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of training rows held out, drawn by content, so that equal rows never stand on both sides."""

    sources: list[DataSource] = []
    """Files of their own instead of a share of the training rows."""


class DataSpec(SpecModel):
    """The data of a run."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """The training rows."""

    eval: EvalSplit = EvalSplit()
    """The rows of the evaluation loss; none when empty."""

    max_length: Annotated[int, Field(ge=8)] = 2048
    """The most tokens a row may have."""

    overflow: Literal["drop", "truncate"] = "truncate"
    """What happens to a longer row: `truncate` cuts its end, and drops it, counted, when no trained token is left;
    `drop` leaves it out, counted. Plain text is cut into pieces instead."""

    train_on: Literal["all", "last", "weights", "completion"] = "all"
    """Which assistant turns are trained, each with its end-of-turn token: `all`; only the `last`; by `weights`, those
    whose message says `weight: 1` or `train: true`; the `completion`, whatever stands after the row's prompt. A
    message's own `weight: 0` or `train: false` always holds."""

    thinking: Literal["template", "drop"] = "template"
    """Reasoning of the assistant: `template` leaves it to the chat template, most of which write that of the last turn
    only; `drop` takes it out of every turn."""

    system: Literal["template", "merge", "drop"] = "template"
    """A system turn: `template` leaves it to the chat template (which may refuse it, or add one of its own); `merge`
    puts it before the first user's text; `drop` takes it out."""

    chat_template: Annotated[str, Field(min_length=1), FilePath()] | None = None
    """A Jinja file to use instead of the model's own template. It is stored with the result."""

    template_options: Annotated[dict[str, bool | int | float | str], Field(examples=[{"enable_thinking": False}])] = {}
    """Variables that the chat template reads, such as `enable_thinking: false`."""

    packing: bool = True
    """Put several rows side by side without padding; a row never sees its neighbours."""

    packing_strategy: Literal["best_fit", "wrapped"] = "best_fit"
    """How rows are packed: `best_fit` keeps every row whole; `wrapped`, for pre-training on plain text, lays documents
    end to end and cuts them into blocks of exactly `max_length` tokens, of which a step takes `train.batch_tokens`."""

    streaming: bool = False
    """Read and encode the training rows while training, from the files as they are, instead of preparing them all
    before it starts: for data larger than memory or disk. `train.max_steps` says when to stop; evaluation rows come
    from `eval.sources`. A resumed run goes on with the very next row."""

    shuffle_buffer_rows: Annotated[int, Field(ge=1)] = 10_000
    """While streaming, the rows of each source that wait in memory to be drawn in random order. The larger, the better
    a sorted file is mixed, and the later the first step."""

    num_workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that prepare rows. One a core for files of 32 MB and more when not given, none for smaller ones."""
