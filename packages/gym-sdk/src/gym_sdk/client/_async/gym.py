"""The client of a daemon."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from gym_sdk._proto.gym.v1 import server_pb2 as pb
from gym_sdk.client import _convert
from gym_sdk.client._async.caller import AsyncCaller
from gym_sdk.client._async.chat import AsyncChat
from gym_sdk.client._async.files import AsyncFiles
from gym_sdk.client._async.jobs import AsyncJobs
from gym_sdk.client._async.keys import AsyncKeys
from gym_sdk.client._async.models import AsyncModels
from gym_sdk.client._async.transport import AsyncTransport, open_transport
from gym_sdk.client.settings import Settings, resolve_settings
from gym_sdk.client.types import ServerInfo


class AsyncGym:
    """A client of a Gym daemon.

        async with AsyncGym() as gym:
            job = await gym.jobs.create("run.yaml")
            async for event in job.events(follow=True):
                print(event)
            job = await job.wait()
            await job.adapter.download("adapter")
            print((await gym.chat.create(job.model_id, "Hello")).text)

    Where the daemon is and which key opens it comes from the arguments, else from `GYM_BASE_URL`, `GYM_API_KEY` and
    `GYM_PROFILE`, else from the profile file, else it is this machine's own daemon. Nothing is sent before the first
    call. `timeout_s` is the whole time that a call may take, repetitions included; `connect_timeout_s` how long it
    tries a daemon that has never answered (one that has is given a minute to start again). `patience_s` is how long
    what may take hours (events, logs, downloads, `wait`) puts up with a daemon that is gone.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        profile: str | None = None,
        timeout_s: float | None = 60.0,
        connect_timeout_s: float = 10.0,
        patience_s: float | None = 900.0,
        transport: AsyncTransport | None = None,
    ) -> None:
        self.settings: Settings = resolve_settings(base_url, api_key, profile)
        self._caller = AsyncCaller(
            transport or open_transport(self.settings),
            self.settings.api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            patience_s=patience_s,
        )
        self.files: AsyncFiles = AsyncFiles(self._caller)
        self.jobs: AsyncJobs = AsyncJobs(self._caller, self.files)
        self.models: AsyncModels = AsyncModels(self._caller)
        self.chat: AsyncChat = AsyncChat(self._caller)
        self.keys: AsyncKeys = AsyncKeys(self._caller)

    async def server_info(self) -> ServerInfo:
        """What the daemon is and can do, and what the key may."""
        answer = await self._caller.unary(
            "ServerService/GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse
        )
        return _convert.server_info(answer)

    async def close(self) -> None:
        """Give the connection up."""
        await self._caller.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
