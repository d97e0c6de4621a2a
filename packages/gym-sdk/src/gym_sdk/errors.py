"""Errors that say what happened, where, and what to do.

GymError                exit code 1: ours, or the machine's
├── UserError           exit code 2: something to change in the input
│   ├── SpecError       the run specification (file, line, path)
│   ├── DataError       a data file (file, line or row, column)
│   ├── ModelError      a model or adapter that is not there or does not fit the request
│   ├── DoesNotFit      more memory than there is, with what would fit
│   ├── OutputInUse     an output folder that holds something else
│   └── MissingExtra    an optional part that is not installed, with the install command
└── RunFailed           a run that started and could not go on
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Where:
    """A place in the user's input. Lines, rows and columns count from 1."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    path: str | None = None
    """The field's path in a specification (`train.learning_rate`) or a record (`messages[2].role`)."""

    def __str__(self) -> str:
        place = self.file or ""
        if self.line is not None:
            place += f":{self.line}" if place else f"line {self.line}"
            if self.column is not None:
                place += f":{self.column}"
        return f"{place}: {self.path}" if place and self.path else place or self.path or ""


class GymError(Exception):
    """Root of Gym's errors. `str()` is the whole message: place, what happened, and a hint."""

    exit_code = 1

    def __init__(self, message: str, *, where: Where | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = str(self.where) if self.where else ""
        text = f"{place}: {self.message}" if place else self.message
        return f"{text}\nhint: {self.hint}" if self.hint else text


class UserError(GymError):
    """Something the user can change."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a file, and where."""

    message: str
    where: Where
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class SpecError(UserError):
    """The run specification is not valid. `problems` has each fault, in the order of the file."""

    def __init__(
        self,
        message: str,
        *,
        where: Where | None = None,
        hint: str | None = None,
        problems: tuple[Problem, ...] = (),
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.problems: tuple[Problem, ...] = problems or (Problem(message=message, where=where or Where(), hint=hint),)

    @classmethod
    def of(cls, problems: tuple[Problem, ...], *, name: str, hint: str | None = None) -> SpecError:
        """One error for all problems of the file `name`; one alone is the message itself."""
        if len(problems) == 1:
            only = problems[0]
            return cls(only.message, where=only.where, hint=only.hint or hint, problems=problems)
        lines = "".join(f"\n  {problem}" for problem in problems)
        return cls(f"{len(problems)} problems{lines}", where=Where(file=name), hint=hint, problems=problems)


class DataError(UserError):
    """A data file cannot be used as it is."""


class ModelError(UserError):
    """A model or adapter is missing, unreadable, or does not suit the request."""


class DoesNotFit(UserError):
    """The plan needs more memory than there is."""


class OutputInUse(UserError):
    """The output folder holds something that would be overwritten."""


class MissingExtra(UserError):
    """An optional part is not installed."""

    def __init__(self, feature: str, *, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}[{extra}], which is not installed",
            hint=f'pip install "{package}[{extra}]"',
        )


class RunFailed(GymError):
    """A run started and could not go on."""
