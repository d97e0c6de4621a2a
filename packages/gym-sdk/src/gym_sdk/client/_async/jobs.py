"""Jobs: submitted, followed across broken lines and restarted daemons, and their results fetched."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_sdk._proto.gym.v1 import jobs_pb2 as pb
from gym_sdk.client import _convert
from gym_sdk.client._async._primitives import sleep, to_thread
from gym_sdk.client._async.caller import AsyncCaller
from gym_sdk.client._async.files import AsyncFiles
from gym_sdk.client._async.pages import all_pages
from gym_sdk.client._progress import OnProgress, quiet
from gym_sdk.client._retry import SAFE, UNSAFE, Backoff, may_reconnect
from gym_sdk.client._safe_path import path_inside
from gym_sdk.client._submit import SpecInput, local_files, read_spec, with_uploads
from gym_sdk.client.errors import NotFound, RemoteError, TimedOut
from gym_sdk.client.types import JobArtifact, JobCheckpoint, JobEvent, JobInfo, JobState
from gym_sdk.errors import RunFailed
from gym_sdk.spec import SPEC_VERSION, canonical_json

OnUpload = Callable[[str], OnProgress]
"""Given a file's path, gives what counts its bytes."""


@dataclass(frozen=True, kw_only=True)
class AsyncJob(JobInfo):
    """A job as it was when it was read, with what can be done about it. `await job.refresh()` reads it again."""

    _jobs: AsyncJobs = field(repr=False, compare=False)

    async def refresh(self) -> AsyncJob:
        """The job as it is now."""
        return await self._jobs.get(self.id)

    def events(self, *, after: int = 0, follow: bool = False) -> AsyncIterator[JobEvent]:
        """Events after the sequence number `after`; with `follow` until the job ends. See `AsyncJobs.events`."""
        return self._jobs.events(self.id, after=after, follow=follow)

    def logs(self, *, offset_bytes: int = 0, follow: bool = False) -> AsyncIterator[str]:
        """What the job's processes print. See `AsyncJobs.logs`."""
        return self._jobs.logs(self.id, offset_bytes=offset_bytes, follow=follow)

    async def wait(self, *, timeout_s: float | None = None, check: bool = True) -> AsyncJob:
        """Wait until the job has ended; returns it as it is then.

        Raises RunFailed where it failed or was cancelled (unless `check` is False), TimedOut where it still runs.
        """
        return await self._jobs.wait(self.id, timeout_s=timeout_s, check=check)

    async def cancel(self) -> AsyncJob:
        """End the job and keep its last checkpoint."""
        return await self._jobs.cancel(self.id)

    async def pause(self) -> AsyncJob:
        """Stop the job at its next checkpoint."""
        return await self._jobs.pause(self.id)

    async def resume(self) -> AsyncJob:
        """Queue the job again, from its last checkpoint."""
        return await self._jobs.resume(self.id)

    async def delete(self) -> None:
        """Delete the job with its run directory. Models made by it stay."""
        await self._jobs.delete(self.id)

    @property
    def adapter(self) -> AsyncArtifact:
        """The adapter that it made."""
        return self.artifact("adapter")

    def artifact(self, kind: str) -> AsyncArtifact:
        """A result that it made: `adapter`, `model`, `report`, `experiences`."""
        return AsyncArtifact(self.id, kind, self._jobs)

    async def artifacts(self) -> tuple[JobArtifact, ...]:
        """Everything that it made so far."""
        return await self._jobs.artifacts(self.id)

    def checkpoints(self) -> AsyncIterator[JobCheckpoint]:
        """Its checkpoints, latest first."""
        return self._jobs.checkpoints(self.id)


@dataclass(frozen=True)
class AsyncArtifact:
    """A result of a job, to be fetched."""

    job_id: str
    kind: str
    _jobs: AsyncJobs = field(repr=False, compare=False)

    async def describe(self) -> JobArtifact:
        """Its files. Raises NotFound where the job has not made it."""
        artifacts = await self._jobs.artifacts(self.job_id)
        for artifact in artifacts:
            if artifact.kind == self.kind:
                return artifact
        made = ", ".join(artifact.kind for artifact in artifacts) or "nothing yet"
        raise NotFound(f"job {self.job_id} has made no {self.kind}", code="NOT_FOUND", hint=f"it has made: {made}")

    async def download(self, folder: str | os.PathLike[str], *, on_progress: OnProgress = quiet) -> Path:
        """Fetch its files into a folder; returns the folder. Goes on where an earlier download broke off."""
        artifact, target = await self.describe(), Path(folder)
        paths = [path_inside(target, file.path) for file in artifact.files]
        before = 0
        for file, path in zip(artifact.files, paths, strict=True):
            await to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            start = before
            await self._jobs.files.download(
                file.file_id,
                path,
                on_progress=lambda done, _, start=start: on_progress(start + done, artifact.size_bytes),
            )
            before += file.size_bytes
        return target


class AsyncJobs:
    """The jobs of a daemon."""

    def __init__(self, caller: AsyncCaller, files: AsyncFiles) -> None:
        self._caller = caller
        self.files: AsyncFiles = files

    async def create(
        self,
        spec: SpecInput,
        overrides: Sequence[str] = (),
        *,
        num_gpus: int | None = None,
        max_attempts: int | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
        on_upload: OnUpload | None = None,
    ) -> AsyncJob:
        """Queue a run.

        `spec` is a run.yaml's path, a RunSpec, or plain data. Files on this machine that it reads are uploaded first.
        With a `request_id` of your own, sending the same job twice queues it once.

        Raises SpecError for a wrong file, InvalidRequest where the daemon finds more (`error.violations`).
        """
        resolved = read_spec(spec, overrides)
        uploads = {}
        for path in local_files(resolved):
            file = await self.files.upload(path, on_progress=on_upload(path) if on_upload else quiet)
            uploads[path] = file.id
        request = self._create_request(with_uploads(resolved, uploads), num_gpus, max_attempts, labels)
        request.request_id = request_id or uuid.uuid4().hex
        return self._job((await self._caller.unary("JobService/CreateJob", request, pb.CreateJobResponse)).job)

    async def validate(self, spec: SpecInput, overrides: Sequence[str] = (), *, num_gpus: int | None = None) -> None:
        """Let the daemon check a specification without queueing it or sending its data.

        Raises SpecError for a wrong file, InvalidRequest where the daemon finds more.
        """
        request = self._create_request(read_spec(spec, overrides), num_gpus, None, None)
        request.request_id, request.validate_only = uuid.uuid4().hex, True
        await self._caller.unary("JobService/CreateJob", request, pb.CreateJobResponse)

    def _create_request(
        self, spec: Any, num_gpus: int | None, max_attempts: int | None, labels: Mapping[str, str] | None
    ) -> pb.CreateJobRequest:
        return pb.CreateJobRequest(
            spec_json=canonical_json(spec),
            spec_version=SPEC_VERSION,
            resources=pb.JobResources(num_gpus=num_gpus) if num_gpus is not None else None,
            retry_policy=pb.RetryPolicy(max_attempts=max_attempts) if max_attempts is not None else None,
            labels=dict(labels or {}),
        )

    async def get(self, job_id: str) -> AsyncJob:
        """One job, as it is now."""
        request = pb.GetJobRequest(job_id=job_id)
        return self._job((await self._caller.unary("JobService/GetJob", request, pb.GetJobResponse)).job)

    async def list(
        self,
        *,
        states: Sequence[JobState | str] = (),
        labels: Mapping[str, str] | None = None,
        all_owners: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[AsyncJob]:
        """Jobs, newest first. `all_owners` needs an admin key."""
        numbers = [_convert.enum_number(state, JobState, pb.JobState, "JOB_STATE_") for state in states]

        async def fetch(token: str) -> tuple[Sequence[pb.Job], str]:
            request = pb.ListJobsRequest(
                page_token=token, states=numbers, labels=dict(labels or {}), all_owners=all_owners
            )
            page = await self._caller.unary("JobService/ListJobs", request, pb.ListJobsResponse)
            return page.jobs, page.next_page_token

        async for job in all_pages(fetch, limit):
            yield self._job(job)

    async def events(self, job_id: str, *, after: int = 0, follow: bool = False) -> AsyncIterator[JobEvent]:
        """The events after a sequence number, in order, none lost and none doubled.

        With `follow` each further one as it happens, until the job has ended; a broken line or a restarted daemon is
        passed over by opening the stream again behind the last event.
        """
        if not follow:

            async def fetch(token: str) -> tuple[Sequence[pb.JobEvent], str]:
                request = pb.ListJobEventsRequest(job_id=job_id, page_token=token)
                page = await self._caller.unary("JobService/ListJobEvents", request, pb.ListJobEventsResponse)
                return page.events, page.next_page_token

            async for message in all_pages(fetch):
                if message.sequence > after:
                    yield _convert.job_event(message)
            return
        backoff, quiet_since_s = Backoff(), time.monotonic()
        while True:
            request = pb.WatchJobEventsRequest(job_id=job_id, after_sequence=after)
            try:
                async for page in self._caller.stream("JobService/WatchJobEvents", request, pb.WatchJobEventsResponse):
                    backoff.reset()
                    quiet_since_s = time.monotonic()
                    for message in page.events:
                        # A daemon that repeats an event after a restart must not repeat it to the caller.
                        if message.sequence > after:
                            after = message.sequence
                            yield _convert.job_event(message)
                return
            except RemoteError as error:
                await self._wait_to_reconnect(error, backoff, quiet_since_s)

    async def logs(self, job_id: str, *, offset_bytes: int = 0, follow: bool = False) -> AsyncIterator[str]:
        """What the job's processes print, as whole lines of text, from an offset on."""
        backoff, quiet_since_s = Backoff(), time.monotonic()
        while True:
            request = pb.WatchJobLogRequest(job_id=job_id, offset_bytes=offset_bytes, follow=follow)
            try:
                async for piece in self._caller.stream("JobService/WatchJobLog", request, pb.WatchJobLogResponse):
                    backoff.reset()
                    quiet_since_s = time.monotonic()
                    offset_bytes = piece.next_offset_bytes
                    if piece.text:
                        yield piece.text
                return
            except RemoteError as error:
                await self._wait_to_reconnect(error, backoff, quiet_since_s)

    async def _wait_to_reconnect(self, error: RemoteError, backoff: Backoff, quiet_since_s: float) -> None:
        patience_s = self._caller.patience_s
        if not may_reconnect(error) or (patience_s is not None and time.monotonic() - quiet_since_s > patience_s):
            raise error
        await sleep(backoff.next_delay_s(error))

    async def wait(self, job_id: str, *, timeout_s: float | None = None, check: bool = True) -> AsyncJob:
        """Wait until a job has ended. Raises RunFailed (unless `check` is False), TimedOut."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        delay_s, backoff, quiet_since_s = 0.2, Backoff(), time.monotonic()
        while True:
            try:
                job = await self.get(job_id)
            except RemoteError as error:
                await self._wait_to_reconnect(error, backoff, quiet_since_s)
                continue
            backoff.reset()
            quiet_since_s = time.monotonic()
            if job.state is not None and job.state.is_final:
                break
            if end_s is not None and time.monotonic() >= end_s:
                raise TimedOut(f"job {job_id} is {job.state} after {timeout_s:g} s", code="DEADLINE_EXCEEDED")
            # Reading a job is cheap for the daemon, and works through every proxy.
            left_s = delay_s if end_s is None else max(0.0, min(delay_s, end_s - time.monotonic()))
            await sleep(left_s)
            delay_s = min(delay_s * 1.5, 5.0)
        if check and job.state is not JobState.SUCCEEDED:
            failure = job.failure
            reason = failure.message if failure else job.state_message
            text = f"job {job_id} {job.state}" + (f": {reason}" if reason else "")
            raise RunFailed(text, hint=(failure.hint or None) if failure else f"gym jobs resume {job_id}")
        return job

    async def cancel(self, job_id: str) -> AsyncJob:
        """End a job and keep its last checkpoint. Cancelling it twice is no error."""
        request = pb.CancelJobRequest(job_id=job_id)
        return self._job((await self._caller.unary("JobService/CancelJob", request, pb.CancelJobResponse)).job)

    async def pause(self, job_id: str) -> AsyncJob:
        """Stop a job at its next checkpoint."""
        request = pb.PauseJobRequest(job_id=job_id)
        return self._job((await self._caller.unary("JobService/PauseJob", request, pb.PauseJobResponse)).job)

    async def resume(self, job_id: str) -> AsyncJob:
        """Queue a paused, failed or cancelled job again."""
        request = pb.ResumeJobRequest(job_id=job_id)
        # Not repeated: a job that failed again in between would be started again unasked.
        answer = await self._caller.unary("JobService/ResumeJob", request, pb.ResumeJobResponse, repeat=UNSAFE)
        return self._job(answer.job)

    async def delete(self, job_id: str) -> None:
        """Delete an ended job with its run directory. Models made by it stay."""
        request = pb.DeleteJobRequest(job_id=job_id)
        await self._caller.unary("JobService/DeleteJob", request, pb.DeleteJobResponse, repeat=SAFE)

    async def artifacts(self, job_id: str) -> tuple[JobArtifact, ...]:
        """What a job has made so far."""
        request = pb.ListJobArtifactsRequest(job_id=job_id)
        answer = await self._caller.unary("JobService/ListJobArtifacts", request, pb.ListJobArtifactsResponse)
        return tuple(_convert.job_artifact(artifact) for artifact in answer.artifacts)

    async def checkpoints(self, job_id: str) -> AsyncIterator[JobCheckpoint]:
        """A job's checkpoints, latest first."""

        async def fetch(token: str) -> tuple[Sequence[pb.JobCheckpoint], str]:
            request = pb.ListJobCheckpointsRequest(job_id=job_id, page_token=token)
            page = await self._caller.unary("JobService/ListJobCheckpoints", request, pb.ListJobCheckpointsResponse)
            return page.checkpoints, page.next_page_token

        async for checkpoint in all_pages(fetch):
            yield _convert.job_checkpoint(checkpoint)

    def _job(self, job: pb.Job) -> AsyncJob:
        return AsyncJob(**_convert.job_values(job), _jobs=self)
