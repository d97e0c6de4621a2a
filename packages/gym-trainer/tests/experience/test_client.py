"""Guards the parts between a call and its answer: limits, waits, reservations, the journal's lines."""

from __future__ import annotations

import asyncio
import email.utils
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_sdk.client._options import local_address_path, local_key_path
from gym_sdk.errors import OutputInUse, RunFailed
from gym_sdk.spec import BudgetSpec, CapsSpec, EndpointSpec, PriceSpec, SamplingSpec
from gym_trainer.experience.budget import (
    Budget,
    BudgetExhausted,
    Reservation,
    Usage,
    bound_prompt_tokens,
    cost_usd,
)
from gym_trainer.experience.caller import Answer, Caller, Dropped
from gym_trainer.experience.client import ChatEndpoint, EndpointError
from gym_trainer.experience.journal import Journal, request_key
from gym_trainer.experience.limits import RateLimit

QUESTION = [{"role": "user", "content": "2 + 2?"}]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def answer(text: str = "4", **more: Any) -> httpx.Response:
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [choice], "usage": usage, **more})


def caller_of(tmp_path: Path, handler: Any, *, endpoint: EndpointSpec | None = None, **options: Any) -> Caller:
    moment = options.pop("moment", None) or Time()
    spec = endpoint or EndpointSpec()
    chat = ChatEndpoint(
        spec, role="student", model="m", transport=httpx.MockTransport(handler), clock=moment.clock, sleep=moment.sleep
    )
    return Caller(
        journal=Journal(tmp_path / "journal.jsonl"),
        budget=Budget(options.pop("budget", BudgetSpec())),
        endpoints={"student": chat},
        seed=0,
        clock=moment.clock,
        **options,
    )


def ask(caller: Caller, count: int = 1, **options: Any) -> list[Any]:
    """`count` draws of one question at once."""

    async def all_of_them() -> list[Any]:
        try:
            return await asyncio.gather(
                *(
                    caller.ask(
                        "student",
                        QUESTION,
                        options.get("sampling", SamplingSpec(max_tokens=50)),
                        draw=f"d/{n}",
                        purpose="training",
                    )
                    for n in range(count)
                ),
                return_exceptions=True,
            )
        finally:
            await caller.close()

    return asyncio.run(all_of_them())


def test_a_request_says_what_the_specification_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer()

    endpoint = EndpointSpec(
        base_url="https://api.example/v1/", api_key_env="MY_KEY", extra_body={"reasoning_effort": "low"}
    )
    sampling = SamplingSpec(temperature=0.3, top_p=0.9, max_tokens=7)
    (got,) = ask(caller_of(tmp_path, handler, endpoint=endpoint), sampling=sampling)
    assert got.text == "4"
    assert str(seen[0].url) == "https://api.example/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer secret"
    body = json.loads(seen[0].content)
    assert isinstance(body.pop("seed"), int)
    assert body == {
        "model": "m",
        "messages": QUESTION,
        "temperature": 0.3,
        "top_p": 0.9,
        "max_tokens": 7,
        "reasoning_effort": "low",
    }
    assert "secret" not in (tmp_path / "journal.jsonl").read_text()


def test_draws_of_one_prompt_have_seeds_of_their_own_and_equal_draws_are_one_call(tmp_path: Path) -> None:
    seeds: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seeds.append(json.loads(request.content)["seed"])
        return answer()

    ask(caller_of(tmp_path, handler), count=3)
    assert len(set(seeds)) == 3
    ask(caller_of(tmp_path, handler), count=4)
    assert len(seeds) == 4, "three answers came from the journal"


def test_equal_requests_at_the_same_time_are_one_call(tmp_path: Path) -> None:
    count = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        await asyncio.sleep(0.01)
        return answer()

    caller = caller_of(tmp_path, handler)

    async def twice() -> None:
        call = {"draw": "same", "purpose": "training"}
        one, two = await asyncio.gather(*(caller.ask("student", QUESTION, SamplingSpec(), **call) for _ in range(2)))
        assert one == two
        await caller.close()

    asyncio.run(twice())
    assert count == 1


def test_a_key_is_of_the_request_and_never_of_the_address() -> None:
    body = {"model": "m", "messages": QUESTION}
    assert request_key("student", body, "a") == request_key("student", dict(reversed(body.items())), "a")
    keys = {request_key("student", body, "a"), request_key("teacher", body, "a"), request_key("student", body, "b")}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "99999"}, 300.0),
        ({"retry-after": email.utils.formatdate(time.time() - 60, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
    ],
)
def test_the_endpoint_says_how_long_to_wait(tmp_path: Path, headers: dict[str, str], wait: float | None) -> None:
    moment, calls = Time(), 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return (
            httpx.Response(429, headers=headers, json={"error": {"message": "slow down"}}) if calls == 1 else answer()
        )

    ask(caller_of(tmp_path, handler, moment=moment))
    assert len(moment.slept) == 1
    if wait is None:
        assert 0.5 <= moment.slept[0] <= 1.0
    else:
        assert moment.slept[0] == wait


def test_waits_double_and_the_last_failure_is_told(tmp_path: Path) -> None:
    moment = Time()
    endpoint = EndpointSpec(max_attempts=5)
    (got,) = ask(caller_of(tmp_path, lambda request: httpx.Response(503), moment=moment, endpoint=endpoint))
    assert isinstance(got, Dropped)
    assert "503" in got.why
    assert "5 attempts" in got.why
    for number, slept in enumerate(moment.slept):
        assert 0.5 * 2**number <= slept <= 2**number


async def never(request: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


def test_an_endpoint_that_is_too_slow_is_asked_twice_and_says_what_to_change(tmp_path: Path) -> None:
    moment = Time()
    endpoint = EndpointSpec(timeout_s=0.01, timeout_per_token_s=0.0, max_attempts=6, max_concurrency=8)
    caller = caller_of(tmp_path, never, moment=moment, endpoint=endpoint)
    results = ask(caller, count=8)
    assert caller.budget.spent["training"].lost_calls == 16, "each may have been charged"
    stopped = [result for result in results if isinstance(result, RunFailed)]
    assert len(stopped) == 1, "eight calls without an answer between them"
    assert "no answer within 0 s, in 2 attempts" in stopped[0].message
    for setting in ("method.student.timeout_s above 0.01", "method.student.max_concurrency below 8", "50 tokens"):
        assert setting in (stopped[0].hint or "")


def test_the_time_for_an_answer_grows_with_its_longest_length(tmp_path: Path) -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        return answer()

    quick, patient = (EndpointSpec(timeout_s=0.01, timeout_per_token_s=each) for each in (0.0, 1.0))
    assert isinstance(ask(caller_of(tmp_path / "a", slow, endpoint=quick))[0], Dropped)
    assert isinstance(ask(caller_of(tmp_path / "b", slow, endpoint=patient))[0], Answer)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "bad key"}}), "refuses the key: bad key"),
        (httpx.Response(404, json={"error": {"message": "no model m"}}), "answers 404"),
        (
            httpx.Response(429, json={"error": {"code": "insufficient_quota", "message": "pay"}}),
            "quota is used up: pay",
        ),
    ],
)
def test_what_no_retry_can_mend_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, response: httpx.Response, message: str
) -> None:
    monkeypatch.setenv("A_KEY", "bad")
    calls = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return response

    endpoint = EndpointSpec(max_concurrency=1, api_key_env="A_KEY")
    results = ask(caller_of(tmp_path, handler, endpoint=endpoint), count=5)
    assert calls == 1
    assert all(isinstance(result, EndpointError) and message in str(result) for result in results)


def test_a_missing_key_variable_is_named_before_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(EndpointError, match="NO_SUCH_KEY"):
        ChatEndpoint(EndpointSpec(api_key_env="NO_SUCH_KEY"), role="student", model="m")


@pytest.mark.parametrize(
    ("environment", "url", "sent"),
    [
        ("given", "http://127.0.0.1:1/v1", "Bearer given"),
        ("given", "https://api.example/v1", None),
        ("", "http://127.0.0.1:8123/v1", "Bearer of-the-daemon"),
        ("", "http://localhost:8123/v1", "Bearer of-the-daemon"),
        ("", "http://127.0.0.1:11434/v1", None),
        ("", "https://api.example:8123/v1", None),
    ],
    ids=["environment", "never elsewhere", "own daemon", "by name", "another server here", "elsewhere, same port"],
)
def test_a_local_key_goes_to_its_own_server_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, url: str, sent: str | None
) -> None:
    """In one terminal `gym serve`, in another `gym train`: nobody has to copy a key."""
    monkeypatch.setenv("GYM_API_KEY", environment)
    monkeypatch.setattr("gym_sdk.client._options.data_dir", lambda: tmp_path)
    local_key_path().write_text("of-the-daemon\n", encoding="ascii")
    local_address_path().write_text(json.dumps({"http_url": "http://127.0.0.1:8123"}), encoding="utf-8")
    seen: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"data": []})

    async def check() -> None:
        endpoint = ChatEndpoint(
            EndpointSpec(base_url=url), role="student", model="m", transport=httpx.MockTransport(handler)
        )
        await endpoint.check()
        await endpoint.close()

    asyncio.run(check())
    assert seen == [sent]


@pytest.mark.parametrize(
    ("environment", "url", "message"),
    [
        ("", "http://127.0.0.1:8123/v1", "refuses the key: no\nhint: it came from {folder}/local.key, which gym"),
        ("given", "http://127.0.0.1:8123/v1", "hint: it came from GYM_API_KEY; unset that for the key of"),
        ("", "http://127.0.0.1:9/v1", "asks for a key, and none was sent: no\nhint: {folder} names no gym serve"),
        ("", "https://api.example/v1", "and none was sent: no\nhint: set method.student.api_key_env to the name of"),
    ],
    ids=["own daemon", "environment", "another server here", "elsewhere"],
)
def test_a_refused_key_is_told_with_where_it_came_from_and_where_the_right_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, url: str, message: str
) -> None:
    monkeypatch.setenv("GYM_API_KEY", environment)
    monkeypatch.setattr("gym_sdk.client._options.data_dir", lambda: tmp_path)
    local_key_path().write_text("of-the-daemon\n", encoding="ascii")
    local_address_path().write_text(json.dumps({"http_url": "http://127.0.0.1:8123"}), encoding="utf-8")

    async def check() -> None:
        refusing = httpx.MockTransport(lambda request: httpx.Response(401, json={"error": {"message": "no"}}))
        endpoint = ChatEndpoint(EndpointSpec(base_url=url), role="student", model="m", transport=refusing)
        try:
            await endpoint.check()
        finally:
            await endpoint.close()

    with pytest.raises(EndpointError) as caught:
        asyncio.run(check())
    assert caught.value.hint is not None
    told = f"{caught.value.message}\nhint: {caught.value.hint}"
    assert message.format(folder=tmp_path) in told
    assert "of-the-daemon" not in told


def test_no_minute_holds_more_than_the_limit() -> None:
    moment = Time()
    times: list[float] = []

    async def work() -> None:
        limit = RateLimit(10, clock=moment.clock, sleep=moment.sleep)

        async def one(amount: float) -> None:
            await limit.acquire(amount)
            times.append(moment.now)

        await asyncio.gather(*(one(1) for _ in range(35)))
        await one(50)

    asyncio.run(work())
    for start in times[:35]:
        assert sum(start <= t < start + 60 for t in times[:35]) <= 10
    assert moment.now == 240.0, "35 at ten a minute, then one that fits into no minute waits for an empty one"


def test_no_more_calls_are_under_way_than_allowed(tmp_path: Path) -> None:
    under_way = most = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return answer()

    ask(caller_of(tmp_path, handler, endpoint=EndpointSpec(max_concurrency=3)), count=20)
    assert most == 3


def test_costs_follow_the_price_table() -> None:
    price = PriceSpec(input_usd_per_million=1.0, output_usd_per_million=4.0, cached_input_usd_per_million=0.25)
    usage = Usage(prompt_tokens=1000, completion_tokens=500, cached_tokens=400)
    assert cost_usd(price, usage) == pytest.approx((600 * 1.0 + 400 * 0.25 + 500 * 4.0) / 1e6)
    plain = PriceSpec(input_usd_per_million=1.0, output_usd_per_million=4.0)
    assert cost_usd(plain, usage) == pytest.approx(0.003)
    assert cost_usd(None, usage) == 0.0


def test_the_bound_of_a_prompt_is_above_any_tokenizer() -> None:
    for text in ("abc", "漢字" * 50, "\x00\x01\x02", "🙂" * 10):
        assert bound_prompt_tokens([{"role": "user", "content": text}]) >= len(text.encode()) + 32


def test_reservations_hold_a_cap_while_calls_are_under_way(tmp_path: Path) -> None:
    """Every call could cost its bound: with room for three bounds, three run, the others wait, and the cap holds."""
    spec = BudgetSpec(training=CapsSpec(tokens=600))
    results = ask(caller_of(tmp_path, lambda request: answer(), budget=spec), count=60)
    answered = [result for result in results if isinstance(result, Answer)]
    refused = [result for result in results if isinstance(result, BudgetExhausted)]
    assert len(answered) + len(refused) == 60
    assert len(answered) * 12 <= 600
    assert len(answered) >= 30, "the room of settled calls is used again"
    assert refused[0].hint == "raise method.budget.training.tokens in the run's spec.yaml and resume it"


def test_usage_that_is_not_reported_counts_as_the_bound(tmp_path: Path) -> None:
    caller = caller_of(tmp_path, lambda request: answer(usage=None))
    ask(caller)
    spent = caller.budget.spent["training"]
    assert spent.prompt_tokens == bound_prompt_tokens(QUESTION)
    assert spent.completion_tokens == 50


def test_what_was_under_way_at_a_kill_counts_as_lost(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    entry = {"type": "request", "key": "k", "purpose": "training", "reserved": {"tokens": 500, "cost_usd": 0.5}}
    journal.note({**entry, "role": "student", "draw": "d", "body": {}})
    asyncio.run(journal.close())
    caller = caller_of(tmp_path, lambda request: answer())
    spent = caller.budget.spent["training"]
    assert (spent.calls, spent.lost_calls, spent.lost_tokens, spent.lost_usd) == (1, 1, 500, 0.5)
    asyncio.run(caller.close())


def test_a_budget_waits_for_room_and_refuses_when_none_can_come() -> None:
    async def work() -> list[str]:
        budget = Budget(BudgetSpec(training=CapsSpec(cost_usd=1.0)))
        order: list[str] = []
        ticket = await budget.reserve("training", Reservation(tokens=1, cost_usd=0.9))

        async def second() -> None:
            await budget.reserve("training", Reservation(tokens=1, cost_usd=0.5))
            order.append("second")

        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        order.append("settled")
        await budget.settle("training", ticket, Usage(prompt_tokens=1, completion_tokens=1), 0.1, lost=False)
        await waiting
        budget.spent["training"].reserved.clear()
        with pytest.raises(BudgetExhausted):
            await budget.reserve("training", Reservation(tokens=1, cost_usd=5.0))
        return order

    assert asyncio.run(work()) == ["settled", "second"]


def test_two_processes_cannot_write_one_journal(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(OutputInUse, match="another process"):
        Journal(tmp_path / "journal.jsonl")
    asyncio.run(first.close())


def test_a_torn_last_line_is_cut_off_before_anything_is_added(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    ask(caller_of(tmp_path, lambda request: answer()))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"answer","key":"ab')
    journal = Journal(path)
    journal.note({"type": "dropped", "key": "k", "why": "w"})
    asyncio.run(journal.close())
    assert path.read_bytes() == whole + b'{"type":"dropped","key":"k","why":"w"}\n'


def test_an_answer_is_on_disk_before_its_caller_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before a second caller sees it, who asks the same while the first one's answer is written."""
    synced: list[bytes] = []
    path = tmp_path / "journal.jsonl"
    writing, may_sync = threading.Event(), threading.Event()

    def fsync(descriptor: int) -> None:
        content = path.read_bytes()
        if b"the answer" in content:
            writing.set()
            assert may_sync.wait(timeout=30)
        synced.append(content)

    monkeypatch.setattr("os.fsync", fsync)
    caller = caller_of(tmp_path, lambda request: answer("the answer"))

    async def ask_once() -> None:
        got = await caller.ask("student", QUESTION, SamplingSpec(), draw="d", purpose="training")
        assert isinstance(got, Answer)
        assert got.key.encode() in synced[-1]
        assert b"the answer" in synced[-1]

    async def work() -> None:
        first = asyncio.create_task(ask_once())
        assert await asyncio.to_thread(writing.wait, 30)
        second = asyncio.create_task(ask_once())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not second.done()
        may_sync.set()
        await asyncio.gather(first, second)
        await caller.close()

    asyncio.run(work())
