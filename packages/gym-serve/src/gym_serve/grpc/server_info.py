"""gym.v1.ServerService and gym.v1.KeyService."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from gym_sdk._proto.gym.v1 import server_pb2 as pb
from gym_sdk.errors import UserError
from gym_serve._database import Database
from gym_serve.auth import Keyring, insert_key, list_keys, make_secret, require_admin, revoke_key
from gym_serve.call import Call
from gym_serve.errors import Reason, not_found
from gym_serve.grpc import convert
from gym_serve.logs import audit


class ServerRpc:
    """What this daemon is."""

    def __init__(self, info: Callable[[], pb.GetServerInfoResponse]) -> None:
        self._info = info

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        """Versions, limits and abilities."""
        response = self._info()
        response.scope = pb.KEY_SCOPE_ADMIN if call.key.is_admin else pb.KEY_SCOPE_USER
        response.key_id = call.key.id
        return response


class KeyRpc:
    """Keys; every call needs an admin's."""

    def __init__(self, database: Database, keyring: Keyring) -> None:
        self._database = database
        self._keyring = keyring

    async def CreateKey(self, request: pb.CreateKeyRequest, call: Call) -> pb.CreateKeyResponse:
        """Makes a key; its secret is in this answer only."""
        require_admin(call.key)
        scope, quota = convert.scope_of(request.scope), convert.quota_of(request.quota)
        secret = make_secret()
        key = await self._database.write(lambda connection: insert_key(connection, request.name, scope, secret, quota))
        audit.info("key created", extra={"by": call.key.name, "key_id": key.id, "scope": key.scope})
        return pb.CreateKeyResponse(key=convert.key_message(key), secret=secret)

    async def ListKeys(self, request: pb.ListKeysRequest, call: Call) -> pb.ListKeysResponse:
        """Every key, the oldest first."""
        require_admin(call.key)
        audit.info("keys listed", extra={"by": call.key.name})
        token, size = convert.read_page(request.page_size, request.page_token, {})
        keys = await self._database.read(list_keys)
        if token is not None:
            ids = [key.id for key in keys]
            keys = keys[ids.index(token) + 1 :] if token in ids else []
        return pb.ListKeysResponse(
            keys=[convert.key_message(key) for key in keys[:size]],
            next_page_token=convert.next_page_token(keys[size - 1].id, {}) if len(keys) > size else "",
        )

    async def RevokeKey(self, request: pb.RevokeKeyRequest, call: Call) -> pb.RevokeKeyResponse:
        """Ends a key."""
        require_admin(call.key)

        def transaction(connection: sqlite3.Connection) -> None:
            try:
                revoke_key(connection, request.key_id)
            except UserError:
                raise not_found(Reason.KEY_NOT_FOUND, request.key_id, field="key_id") from None

        await self._database.write(transaction)
        self._keyring.forget()
        audit.info("key revoked", extra={"by": call.key.name, "key_id": request.key_id})
        keys = await self._database.read(list_keys)
        key = next(key for key in keys if request.key_id in (key.id, key.name) and key.revoked_at is not None)
        return pb.RevokeKeyResponse(key=convert.key_message(key))
