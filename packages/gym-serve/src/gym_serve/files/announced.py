"""What a client says of a file before or beside its content, and whether such a file may come."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from gym_serve.auth import Key
from gym_serve.errors import Reason, ServiceError, invalid
from gym_serve.files.store import Upload
from gym_serve.settings import LimitSettings

TRAINING_PURPOSE = "fine-tune"
"""Files of this purpose must be rows that gym-data can read."""
ADAPTER_PURPOSE = "adapter"
RESULT_PURPOSE = "fine-tune-results"
PURPOSES = (TRAINING_PURPOSE, RESULT_PURPOSE, ADAPTER_PURPOSE, "user_data", "batch", "evals", "assistants", "vision")


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A file that is to come."""

    filename: str
    purpose: str
    size_bytes: int
    sha256: str | None = None
    """Checked when all is here."""
    request_id: str | None = None
    """The same key's second announcement with it is the first one again."""
    expires_after_s: float | None = None
    """The life of the complete file; for ever where None."""

    def check(self, limits: LimitSettings) -> None:
        """Raises `ServiceError` for what no file may be."""
        # A name is kept to show it; no path is ever made of it.
        if not 0 < len(self.filename) <= 255 or any(ord(each) < 32 or each in "/\\" for each in self.filename):
            raise invalid("a file's name has 1 to 255 characters, no slash and no control character", field="filename")
        if self.purpose not in PURPOSES:
            raise invalid(f"purpose must be one of {', '.join(PURPOSES)}; got '{self.purpose}'", field="purpose")
        if self.sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.sha256):
            raise invalid("sha256 must be 64 hexadecimal digits", field="sha256")
        if self.size_bytes < 0:
            raise invalid("the size must not be negative", field="size_bytes")
        if self.expires_after_s is not None and not 0 < self.expires_after_s < 1e9:
            raise invalid("a file expires after more than 0 seconds", field="expires_after")
        if self.size_bytes > limits.max_file_bytes:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"{self.size_bytes} bytes are more than the {limits.max_file_bytes} that a file may have here",
                field="size_bytes",
                http_status=413,
            )

    def upload(self, key: Key, upload_id: str) -> Upload:
        """The upload that it becomes."""
        now = time.time()
        return Upload(
            id=upload_id,
            owner=key.id,
            request_id=self.request_id,
            filename=self.filename,
            purpose=self.purpose,
            size_bytes=self.size_bytes,
            sha256=self.sha256,
            created_at=now,
            touched_at=now,
            expires_after_s=self.expires_after_s,
            state="pending",
        )

    def check_is(self, known: Upload) -> None:
        """Raises `ServiceError` where an upload of the same request id is of another file."""
        if (known.filename, known.size_bytes, known.sha256) != (self.filename, self.size_bytes, self.sha256):
            raise ServiceError(
                Reason.REQUEST_ID_REUSED,
                f"request id '{self.request_id}' was used for another file before",
                hint="use a new request id for each file",
            )
