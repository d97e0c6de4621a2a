"""gym.v1.JobService."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gym_sdk._proto.gym.v1 import jobs_pb2 as pb
from gym_serve.call import Call
from gym_serve.catalog import Catalog
from gym_serve.errors import invalid
from gym_serve.grpc import convert
from gym_serve.jobs.model import Job, JobState, checkpoint_name
from gym_serve.jobs.service import JobService


class JobRpc:
    """Methods by their names in the schema."""

    def __init__(self, jobs: JobService, catalog: Catalog) -> None:
        self._jobs = jobs
        self._catalog = catalog

    async def CreateJob(self, request: pb.CreateJobRequest, call: Call) -> pb.CreateJobResponse:
        """Checks a specification and queues it."""
        if len(request.request_id) > 64:
            raise invalid("a request id has at most 64 characters", field="request_id")
        job = await self._jobs.create(
            call.key,
            request.spec_json,
            request_id=request.request_id or None,
            labels=dict(request.labels),
            num_gpus=request.resources.num_gpus if request.resources.HasField("num_gpus") else None,
            max_attempts=request.retry_policy.max_attempts or None,
            validate_only=request.validate_only,
        )
        return pb.CreateJobResponse(job=convert.job_message(job) if request.validate_only else await self._message(job))

    async def GetJob(self, request: pb.GetJobRequest, call: Call) -> pb.GetJobResponse:
        """A job."""
        return pb.GetJobResponse(job=await self._message(await self._jobs.get(call.key, request.job_id)))

    async def ListJobs(self, request: pb.ListJobsRequest, call: Call) -> pb.ListJobsResponse:
        """Jobs, the newest first."""
        filters = {
            "states": list(request.states),
            "labels": dict(request.labels),
            "all_owners": request.all_owners,
        }
        after, size = convert.read_page(request.page_size, request.page_token, filters)
        found = await self._jobs.list(
            call.key,
            states=[convert.state_of(number) for number in request.states],
            labels=dict(request.labels),
            after=after,
            limit=size + 1,
            everyone=request.all_owners,
        )
        return pb.ListJobsResponse(
            jobs=[await self._message(job) for job in found[:size]],
            next_page_token=convert.next_page_token(found[size - 1].id, filters) if len(found) > size else "",
        )

    async def CancelJob(self, request: pb.CancelJobRequest, call: Call) -> pb.CancelJobResponse:
        """Ends a job."""
        return pb.CancelJobResponse(job=await self._message(await self._jobs.cancel(call.key, request.job_id)))

    async def PauseJob(self, request: pb.PauseJobRequest, call: Call) -> pb.PauseJobResponse:
        """Stops a job for a while."""
        return pb.PauseJobResponse(job=await self._message(await self._jobs.pause(call.key, request.job_id)))

    async def ResumeJob(self, request: pb.ResumeJobRequest, call: Call) -> pb.ResumeJobResponse:
        """Queues a stopped job again."""
        return pb.ResumeJobResponse(job=await self._message(await self._jobs.resume(call.key, request.job_id)))

    async def DeleteJob(self, request: pb.DeleteJobRequest, call: Call) -> pb.DeleteJobResponse:
        """Removes a job."""
        await self._jobs.delete(call.key, request.job_id)
        return pb.DeleteJobResponse()

    async def ListJobEvents(self, request: pb.ListJobEventsRequest, call: Call) -> pb.ListJobEventsResponse:
        """A page of events."""
        filters = {"job": request.job_id, "newest_first": request.newest_first}
        token, size = convert.read_page(request.page_size, request.page_token, filters, default=200)
        place = int(token) if token is not None and token.isdigit() else None
        if request.newest_first:
            found = await self._jobs.latest_events(call.key, request.job_id, before=place, limit=size + 1)
        else:
            found = await self._jobs.events(call.key, request.job_id, after=place or 0, limit=size + 1)
        last = str(found[size - 1].sequence) if len(found) > size else ""
        return pb.ListJobEventsResponse(
            events=[convert.event_message(event) for event in found[:size]],
            next_page_token=convert.next_page_token(last, filters) if last else "",
        )

    async def WatchJobEvents(
        self, request: pb.WatchJobEventsRequest, call: Call
    ) -> AsyncIterator[pb.WatchJobEventsResponse]:
        """Every event after a cursor, and each further one."""
        async for batch in self._jobs.follow(call.key, request.job_id, after=request.after_sequence):
            yield pb.WatchJobEventsResponse(events=[convert.event_message(event) for event in batch])

    async def WatchJobLog(self, request: pb.WatchJobLogRequest, call: Call) -> AsyncIterator[pb.WatchJobLogResponse]:
        """What the job's processes print."""
        async for text, offset in self._jobs.follow_output(
            call.key, request.job_id, offset=request.offset_bytes, follow=request.follow
        ):
            yield pb.WatchJobLogResponse(text=text, next_offset_bytes=offset)

    async def ListJobCheckpoints(
        self, request: pb.ListJobCheckpointsRequest, call: Call
    ) -> pb.ListJobCheckpointsResponse:
        """Checkpoints, the latest first."""
        filters = {"job": request.job_id}
        token, size = convert.read_page(request.page_size, request.page_token, filters)
        job = await self._jobs.get(call.key, request.job_id)
        found = [
            checkpoint
            for checkpoint in await self._jobs.checkpoints(call.key, request.job_id)
            if token is None or checkpoint.step < int(token)
        ]
        return pb.ListJobCheckpointsResponse(
            checkpoints=[
                convert.checkpoint_message(
                    checkpoint, name if self._catalog.has(name := checkpoint_name(job, checkpoint.step)) else ""
                )
                for checkpoint in found[:size]
            ],
            next_page_token=convert.next_page_token(str(found[size - 1].step), filters) if len(found) > size else "",
        )

    async def ListJobArtifacts(self, request: pb.ListJobArtifactsRequest, call: Call) -> pb.ListJobArtifactsResponse:
        """The files that a job made."""
        job = await self._jobs.get(call.key, request.job_id)
        return pb.ListJobArtifactsResponse(artifacts=convert.artifact_messages(job.artifacts))

    async def _message(self, job: Job) -> pb.Job:
        position = await self._jobs.queue_position(job) if job.state is JobState.QUEUED else None
        return convert.job_message(job, position)
