"""Is this file training data? Asked of gym-data, in a process of its own.

Reading a large file takes seconds of processor time, which in the daemon's process would stall every stream; and
what a stranger's file can do to a parser's memory stays in that process too.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

from gym_serve.errors import Reason, ServiceError, as_service_error

_TIMEOUT_S = 600.0
_MEMORY_BYTES = 4 * 1024**3
_SIDE_BY_SIDE = 2
_slots = asyncio.Semaphore(_SIDE_BY_SIDE)


async def check_training_data(path: Path, filename: str) -> tuple[str, int]:
    """The format and the number of rows. Raises `ServiceError` with gym-data's message: file, line, column, hint."""
    async with _slots:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gym_serve.files.check", str(path), filename),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
        except TimeoutError:
            raise ServiceError(
                Reason.DATASET_INVALID, f"{filename}: reading it took more than {_TIMEOUT_S:.0f} s"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0:
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ServiceError(
            Reason.DATASET_INVALID,
            f"{filename}: it could not be read ({' '.join(last) or 'out of memory'})",
        )
    answer = json.loads(output)
    if "message" in answer:
        raise ServiceError(Reason.DATASET_INVALID, answer["message"], field=answer["field"], hint=answer["hint"])
    return answer["format"], answer["num_rows"]


def _check(path: Path, filename: str) -> dict[str, object]:
    from gym_data import read_records
    from gym_sdk.errors import GymError, Where
    from gym_sdk.spec.data import DataSource

    with tempfile.TemporaryDirectory() as folder:
        # Readers go by the ending, which a blob has not.
        named = Path(folder, "file" + "".join(Path(filename).suffixes[-2:]))
        named.symlink_to(path.absolute())
        formats: Counter[str] = Counter()
        try:
            for record in read_records(DataSource(source=str(named))):
                formats[record.source.format if record.source else "unknown"] += 1
        except GymError as error:
            if error.where is not None:
                place = error.where
                error.where = Where(file=filename, line=place.line, column=place.column, path=place.path)
            problem = as_service_error(error)
            return {"message": problem.message, "field": problem.field, "hint": problem.hint}
    if not formats:
        return {"message": f"{filename}: it has no rows", "field": None, "hint": None}
    return {"format": "+".join(sorted(formats)), "num_rows": sum(formats.values())}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    json.dump(_check(Path(sys.argv[1]), sys.argv[2]), sys.stdout)
