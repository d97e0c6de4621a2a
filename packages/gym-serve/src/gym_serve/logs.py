"""The daemon's log: one line a message, for people or as JSON, each with the id of the call that it belongs to.

Never in a log: keys, prompts, answers, rows of data.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

from gym_serve.settings import LogSettings

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the call that is being worked on; a background task has none."""

audit: logging.Logger = logging.getLogger("gym_serve.audit")
"""One line for each call that needs the admin scope, and for each one that was refused for want of a key or a scope."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`2026-11-30T12:00:00Z INFO gym_serve.jobs.runner [request] message  name=value`"""

    def format(self, record: logging.LogRecord) -> str:
        """One record as a line."""
        text = f"{_timestamp(record)} {record.levelname} {record.name} [{request_id.get()}] {record.getMessage()}"
        extra = _extra(record)
        if extra:
            text += "  " + " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in extra.items())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as a line."""
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": request_id.get(),
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(settings: LogSettings) -> None:
    """Sends every logger of this process to stderr in the format of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    # Their lines say less than the daemon's own access log, and one of them would say it twice.
    for name in ("uvicorn.access", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
