"""An error that the fake daemon answers with."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

Code = grpc.StatusCode


class Refusal(Exception):
    """An error that a call answers with."""

    def __init__(
        self,
        code: Code,
        reason: str = "",
        message: str = "refused",
        *,
        hint: str = "",
        violations: dict[str, str] | None = None,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.details = code, message, []
        if reason:
            info = error_details_pb2.ErrorInfo(reason=reason, domain="gym", metadata={**(metadata or {})})
            if hint:
                info.metadata["hint"] = hint
            self.details.append(info)
        if violations:
            request = error_details_pb2.BadRequest()
            for path, description in violations.items():
                request.field_violations.add(field=path, description=description)
            self.details.append(request)
        if retry_after_s is not None:
            info = error_details_pb2.RetryInfo()
            info.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
            self.details.append(info)

    def status(self) -> bytes:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return status.SerializeToString()


CUT = Refusal(Code.UNAVAILABLE, message="the line is cut")
