"""An OpenAI-compatible chat endpoint, called patiently: limits, concurrency, Retry-After, backoff.

What a call ends in:

    Reply               an answer
    CallFailed          this one call cannot be answered: refused for good, or failed in every attempt
    EndpointError       no call can be: a wrong key, an unknown model, a used-up quota, an endpoint that is down
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from gym_sdk.client import local_key_path
from gym_sdk.client.settings import local_key_for
from gym_sdk.errors import UserError
from gym_sdk.spec.training_free import EndpointSpec
from gym_trainer.experience.budget import Usage
from gym_trainer.experience.limits import Clock, RateLimit, Sleep

RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
LONGEST_WAIT_S = 300.0
CONNECT_TIMEOUT_S = 15.0
MAX_TIMEOUTS = 2
"""Attempts of one call that may end without an answer in time. The first may be an accident; a second one is the
endpoint's pace, and each may have been charged."""


class EndpointError(UserError):
    """The endpoint cannot be used as specified."""


class CallFailed(Exception):
    """One call has no answer. Never a reward."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint: str | None = hint


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why an attempt has no answer, and may be made again."""

    why: str
    wait_s: float | None = None
    """How long the endpoint asks to wait."""

    timed_out: bool = False
    """It took longer than the specification allows."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An endpoint's answer to one call."""

    text: str
    finish_reason: str
    usage: Usage | None
    """None when the endpoint reports none."""


class Attempts:
    """Told about each attempt of a call: `begin` may refuse it, exactly one of the others follows."""

    async def begin(self) -> float | None:
        """Before an attempt; returns the most seconds it may take. Raises BudgetExhausted."""
        return None

    async def refused(self) -> None:
        """The endpoint turned it down without working on it."""

    async def lost(self, why: str) -> None:
        """It ended without an answer, and may have been charged."""


class ChatEndpoint:
    """One endpoint and the model on it."""

    def __init__(
        self,
        spec: EndpointSpec,
        *,
        role: str,
        model: str,
        offline: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.spec: EndpointSpec = spec
        self.role: str = role
        self.model: str = model
        self._sleep = sleep
        self._random = random.Random(role)
        self._slots = asyncio.Semaphore(spec.max_concurrency)
        self._requests = RateLimit(spec.requests_per_minute, clock=clock, sleep=sleep)
        self._tokens = RateLimit(spec.tokens_per_minute, clock=clock, sleep=sleep)
        key = None if offline else _api_key(spec, role)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(CONNECT_TIMEOUT_S, spec.timeout_s)),
            limits=httpx.Limits(max_connections=spec.max_concurrency, max_keepalive_connections=spec.max_concurrency),
            transport=transport,
        )

    @property
    def is_local(self) -> bool:
        """Whether the endpoint stands on this machine, where calls cost nothing unless a price says so."""
        return is_loopback(self.spec.base_url)

    async def close(self) -> None:
        await self._http.aclose()

    async def check(self) -> None:
        """Ask for the endpoint's models, which costs nothing. Raises EndpointError with what to change."""
        url = self._url("models")
        try:
            response = await self._http.get(url, timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            hint = "gym serve starts one on this machine" if self.is_local else "check the address and the network"
            raise EndpointError(
                f"the {self.role} endpoint {self.spec.base_url} cannot be reached: {_reason(error)}", hint=hint
            ) from None
        if response.status_code in (401, 403):
            raise self._wrong_key(response)
        if response.status_code != 200:
            return  # Endpoints need not list their models; the first call will tell.
        try:
            listed = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return
        if listed and self.model not in listed:
            raise EndpointError(
                f"the {self.role} endpoint {self.spec.base_url} has no model {self.model!r}",
                hint=f"it has {', '.join(listed[:8])}; set method.{self.role}.model",
            )

    async def complete(self, body: dict[str, Any], *, tokens: float, attempts: Attempts) -> Reply:
        """POST a chat request. `tokens` is its size for the rate limit.

        Raises CallFailed, EndpointError, and whatever `attempts.begin` raises.
        """
        why = "no attempt was made"
        timeouts = 0
        for number in range(1, self.spec.max_attempts + 1):
            await self._requests.acquire(1)
            await self._tokens.acquire(tokens)
            async with self._slots:
                limit_s = await attempts.begin()
                outcome = await self._attempt(body, limit_s, attempts)
            if isinstance(outcome, Reply):
                return outcome
            why = outcome.why
            timeouts += outcome.timed_out
            if timeouts == MAX_TIMEOUTS:
                raise CallFailed(f"{why}, in {timeouts} attempts", hint=self._how_to_wait(body))
            if number < self.spec.max_attempts:
                # Full jitter on doubling waits; what the endpoint asks for comes first.
                backoff_s = min(60.0, 2.0 ** (number - 1)) * self._random.uniform(0.5, 1.0)
                await self._sleep(min(LONGEST_WAIT_S, backoff_s if outcome.wait_s is None else outcome.wait_s))
        raise CallFailed(f"{why}, in each of {self.spec.max_attempts} attempts")

    async def _attempt(self, body: dict[str, Any], limit_s: float | None, attempts: Attempts) -> Reply | _Failure:
        """An answer, or why there is none; `limit_s` is what the budget leaves."""
        timeout_s = self._timeout_s(body)
        try:
            async with asyncio.timeout(timeout_s if limit_s is None else min(limit_s, timeout_s)):
                response = await self._http.post(self._url("chat/completions"), json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            await attempts.refused()
            return _Failure(why=f"it cannot be reached ({_reason(error)})")
        except (httpx.TimeoutException, TimeoutError):
            if limit_s is not None and limit_s < timeout_s:
                failure = _Failure(why=f"no answer in the {limit_s:.0f} s that the budget had left")
            else:
                failure = _Failure(why=f"no answer within {timeout_s:.0f} s", timed_out=True)
            await attempts.lost(failure.why)
            return failure
        except httpx.HTTPError as error:
            await attempts.lost(_reason(error))
            return _Failure(why=_reason(error))
        status = response.status_code
        if status == 200:
            reply = _parse(response)
            if reply is not None:
                return reply
            await attempts.lost("an answer that is not of the chat API")
            return _Failure(why="an answer that is not of the chat API")
        await attempts.refused()
        if status in (401, 403):
            raise self._wrong_key(response)
        message = _error_message(response)
        if status == 429 and ("insufficient_quota" in response.text or "billing" in message.lower()):
            raise EndpointError(f"the {self.role} endpoint's quota is used up: {message}")
        if status == 404:
            raise EndpointError(
                f"the {self.role} endpoint answers 404 at {self._url('chat/completions')}: {message}",
                hint=f"check method.{self.role}.base_url and method.{self.role}.model",
            )
        if status in RETRY_STATUS:
            return _Failure(why=f"status {status} ({message})", wait_s=_retry_after(response))
        raise CallFailed(f"refused with status {status}: {message}")

    def _url(self, path: str) -> str:
        return f"{self.spec.base_url.rstrip('/')}/{path}"

    def _timeout_s(self, body: dict[str, Any]) -> float:
        return self.spec.timeout_s + self.spec.timeout_per_token_s * int(body.get("max_tokens", 0))

    def _how_to_wait(self, body: dict[str, Any]) -> str:
        """What to change when answers take too long, with the values in force."""
        part = f"method.{self.role}"
        return (
            f"a slow endpoint needs {part}.timeout_s above {self.spec.timeout_s:g}, {part}.max_concurrency below "
            f"{self.spec.max_concurrency}, or answers of fewer than {body.get('max_tokens', 0)} tokens"
        )

    def _wrong_key(self, response: httpx.Response) -> EndpointError:
        what = "refuses the key" if self._http.headers.get("authorization") else "asks for a key, and none was sent"
        message = f"the {self.role} endpoint {self.spec.base_url} {what}: {_error_message(response)}"
        return EndpointError(message, hint=self._which_key())

    def _which_key(self) -> str:
        """Where the key came from, and where the right one is."""
        name, part = self.spec.api_key_env, f"method.{self.role}.api_key_env"
        if name:
            return f"check the value of {name}"
        if not self.is_local:
            return f"set {part} to the name of the environment variable that holds it"
        ours = local_key_path()
        if os.environ.get("GYM_API_KEY"):
            return f"it came from GYM_API_KEY; unset that for the key of this machine's own gym serve, {ours}"
        if local_key_for(self.spec.base_url):
            return f"it came from {ours}, which gym serve makes; start that again, or set {part} for another server"
        return (
            f"{ours.parent} names no gym serve at this address; where it runs with another --data-dir, put the "
            f"{ours.name} of that folder into GYM_API_KEY, and for another server set {part}"
        )


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _api_key(spec: EndpointSpec, role: str) -> str | None:
    if spec.api_key_env is None:
        if not is_loopback(spec.base_url):
            return None
        return os.environ.get("GYM_API_KEY") or local_key_for(spec.base_url)
    key = os.environ.get(spec.api_key_env, "").strip()
    if not key:
        raise EndpointError(
            f"the environment variable {spec.api_key_env}, which holds the {role} endpoint's key, is not set",
            hint=f"export {spec.api_key_env}=...",
        )
    return key


def _parse(response: httpx.Response) -> Reply | None:
    try:
        data = response.json()
        choice = data["choices"][0]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            return None
        usage = data.get("usage")
        details = (usage or {}).get("prompt_tokens_details") or {}
        counted = (
            Usage(
                prompt_tokens=int(usage["prompt_tokens"]),
                completion_tokens=int(usage["completion_tokens"]),
                cached_tokens=int(details.get("cached_tokens") or usage.get("prompt_cache_hit_tokens") or 0),
            )
            if usage
            else None
        )
        return Reply(text=text, finish_reason=str(choice.get("finish_reason") or "stop"), usage=counted)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _error_message(response: httpx.Response) -> str:
    try:
        error = response.json().get("error")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = None
    return " ".join(str(text or response.text or response.reason_phrase).split())[:300]


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the endpoint asks to wait, from `retry-after-ms` or `Retry-After` (seconds or a date)."""
    try:
        if (milliseconds := response.headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        value = response.headers.get("retry-after")
        if value is None:
            return None
        try:
            return max(0.0, float(value))
        except ValueError:
            when = email.utils.parsedate_to_datetime(value)
            return max(0.0, when.timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
