"""API keys of a daemon. Every call needs an admin key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from gym_sdk._proto.gym.v1 import server_pb2 as pb
from gym_sdk.client import _convert
from gym_sdk.client._async.caller import AsyncCaller
from gym_sdk.client._async.pages import all_pages
from gym_sdk.client._retry import UNSAFE
from gym_sdk.client.types import KeyInfo, KeyQuota, KeyScope


class AsyncKeys:
    """The keys of a daemon."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def create(
        self, name: str, *, scope: KeyScope | str = KeyScope.USER, quota: KeyQuota | None = None
    ) -> tuple[KeyInfo, str]:
        """Make a key; returns it with its secret, which nobody can read again."""
        request = pb.CreateKeyRequest(name=name, scope=_convert.key_scope(scope), quota=_convert.key_quota(quota))
        # Not repeated: a key whose secret got lost on the way would stay behind.
        answer = await self._caller.unary("KeyService/CreateKey", request, pb.CreateKeyResponse, repeat=UNSAFE)
        return _convert.key_info(answer.key), answer.secret

    async def list(self) -> AsyncIterator[KeyInfo]:
        """Every key, without secrets."""

        async def fetch(token: str) -> tuple[Sequence[pb.Key], str]:
            page = await self._caller.unary(
                "KeyService/ListKeys", pb.ListKeysRequest(page_token=token), pb.ListKeysResponse
            )
            return page.keys, page.next_page_token

        async for key in all_pages(fetch):
            yield _convert.key_info(key)

    async def revoke(self, key_id: str) -> KeyInfo:
        """Let a key open nothing from now on."""
        answer = await self._caller.unary(
            "KeyService/RevokeKey", pb.RevokeKeyRequest(key_id=key_id), pb.RevokeKeyResponse
        )
        return _convert.key_info(answer.key)
