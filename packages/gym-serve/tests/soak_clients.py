"""The clients of the soak, as people use them: the official `openai` client and gym-sdk with their defaults.

Each says how one request ended:

- `right`: the whole expected answer, and a good ending;
- `refused`: the daemon's own error, 429 or 503 (UNAVAILABLE, RESOURCE_EXHAUSTED) with its reason, also in a stream;
- `cut`: a stream broke after its first piece, and the client raised its own type of error for that;
- `failed`: no answer and no refusal, whatever the client tried by itself: nobody listened, or the line broke;
- `wrong`: anything else: another text with a good ending, no end at all, another error, an exception of no known type.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Literal, Protocol

import httpx
import openai

from gym_sdk.client import AsyncGym
from gym_sdk.client.errors import LimitExceeded, RemoteError, Unavailable

Ending = Literal["right", "refused", "cut", "failed", "wrong"]
ANSWER_TIMEOUT_S = 120.0


class Refused(Exception):
    """The daemon said no, in its own words."""


class Broken(Exception):
    """The line, with the client's own type of error."""


class Client(Protocol):
    """One user with a client."""

    def pieces(self, model: str, content: str) -> AsyncIterator[str]:
        """A streamed answer. Raises Refused or Broken."""
        ...

    async def whole(self, model: str, content: str) -> str:
        """An answer in one piece. Raises Refused or Broken."""
        ...

    async def read(self) -> None:
        """A small call that changes nothing. Raises Refused or Broken."""
        ...

    async def close(self) -> None:
        """Leaves."""
        ...


async def ask(
    client: Client, model: str, content: str, expected: str, *, stream: bool, on_first: Callable[[], None]
) -> tuple[Ending, str]:
    """How an answer ended, and what is to be said about it."""
    text = ""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if stream:
                async with aclosing(client.pieces(model, content)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        if piece and not text:
                            on_first()
                        text += piece
            else:
                text = await client.whole(model, content)
    except Refused as refusal:
        return "refused", str(refusal)
    except Broken as error:
        return ("cut" if text else "failed"), str(error)
    except TimeoutError:
        return "wrong", f"{expected}: no end in {ANSWER_TIMEOUT_S:.0f} s"
    except Exception as error:  # noqa: BLE001 - whatever a client raises is a finding
        return "wrong", f"{expected}: {type(error).__name__}: {error}"
    return ("right", "") if text == expected else ("wrong", f"{expected}: got {text!r}")


async def read(client: Client) -> tuple[Ending, str]:
    """How a small call ended."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await client.read()
    except Refused as refusal:
        return "refused", str(refusal)
    except Broken as error:
        return "failed", str(error)
    except Exception as error:  # noqa: BLE001 - whatever a client raises is a finding
        return "wrong", f"a read: {type(error).__name__}: {error}"
    return "right", ""


class OpenAIClient:
    """The official client with its defaults: two repetitions, ten minutes."""

    def __init__(self, http_url: str, key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{http_url}/v1", api_key=key)

    async def pieces(self, model: str, content: str) -> AsyncIterator[str]:
        try:
            stream = await self._client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": content}], stream=True
            )
            async with stream:
                finished = False
                async for chunk in stream:
                    finished = finished or chunk.choices[0].finish_reason is not None
                    yield chunk.choices[0].delta.content or ""
        except openai.APIError as error:
            raise _of_openai(error) from error
        assert finished, "the stream ended without a finish reason"

    async def whole(self, model: str, content: str) -> str:
        try:
            answer = await self._client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": content}]
            )
        except openai.APIError as error:
            raise _of_openai(error) from error
        return answer.choices[0].message.content or ""

    async def read(self) -> None:
        try:
            assert [model async for model in self._client.models.list()]
        except openai.APIError as error:
            raise _of_openai(error) from error

    async def close(self) -> None:
        await self._client.close()


def _of_openai(error: openai.APIError) -> Exception:
    if isinstance(error, openai.APIStatusError) and error.status_code not in (429, 503):
        return error
    if isinstance(error, openai.APIConnectionError):
        return Broken(repr(error.__cause__ or error))
    body = error.body
    if isinstance(body, dict) and body.get("message") and body.get("type"):
        return Refused(str(body["message"]))
    return error


class SdkClient:
    """gym-sdk with its defaults, over gRPC or HTTP."""

    def __init__(self, address: str, key: str) -> None:
        self._gym = AsyncGym(address, api_key=key)

    async def pieces(self, model: str, content: str) -> AsyncIterator[str]:
        finished = False
        try:
            async with self._gym.chat.stream(model, content) as stream:
                async for chunk in stream:
                    finished = finished or any(choice.finish_reason for choice in chunk.choices)
                    yield chunk.text
        except RemoteError as error:
            raise _of_sdk(error) from error
        assert finished, "the stream ended without a finish reason"

    async def whole(self, model: str, content: str) -> str:
        try:
            return (await self._gym.chat.create(model, content)).text
        except RemoteError as error:
            raise _of_sdk(error) from error

    async def read(self) -> None:
        try:
            assert [model async for model in self._gym.models.list()]
        except RemoteError as error:
            raise _of_sdk(error) from error

    async def close(self) -> None:
        await self._gym.close()


def _of_sdk(error: RemoteError) -> Exception:
    if not isinstance(error, Unavailable | LimitExceeded):
        return error
    return Refused(error.message) if error.reason else Broken(error.message)


class PlainClient:
    """HTTP and nothing else: it repeats no request."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def pieces(self, model: str, content: str) -> AsyncIterator[str]:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise self._refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if not line:
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise Refused(event["error"]["message"])
                    yield event["choices"][0]["delta"].get("content") or ""
        except httpx.HTTPError as error:
            raise Broken(repr(error)) from error
        raise Broken("the stream ended early")

    async def whole(self, model: str, content: str) -> str:
        return "".join([piece async for piece in self.pieces(model, content)])

    async def read(self) -> None:
        try:
            (await self._http.get("/v1/models")).raise_for_status()
        except httpx.TransportError as error:
            raise Broken(repr(error)) from error

    async def close(self) -> None:
        await self._http.aclose()

    def _refusal(self, status: int, content: bytes) -> Exception:
        try:
            message = json.loads(content)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return ValueError(f"status {status} without an error: {content[:100]!r}")
        return Refused(message) if status in (429, 503) else ValueError(f"status {status}: {message}")
