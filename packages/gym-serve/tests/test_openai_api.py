"""Guards OpenAI's API: the newest official client, unmodified, from a file to a tuned model; errors in its form."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from daemon_process import DaemonProcess

from gym_data import read_records
from gym_sdk.spec import Dpo, load_spec
from gym_sdk.spec.preference import chosen_reference

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
ROWS = (json.dumps(ROW) + "\n").encode() * 3


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    return shared_daemon


@pytest.fixture
def client(daemon: DaemonProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key, max_retries=0)


def wait_for(client: openai.OpenAI, job_id: str, *states: str):
    deadline = time.monotonic() + 60
    while (job := client.fine_tuning.jobs.retrieve(job_id)).status not in states:
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def test_unmodified_openai_client(client: openai.OpenAI) -> None:
    file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(ROWS), "rows.jsonl", "fine-tune", "processed")
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file.id,
        suffix="steps-5",
        seed=7,
        metadata={"seat": "12"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4}}},
    )
    assert (job.object, job.status, job.fine_tuned_model, job.seed) == ("fine_tuning.job", "queued", None, 7)
    assert job.method is not None
    assert job.method.supervised is not None
    assert job.method.supervised.hyperparameters is not None
    assert job.method.supervised.hyperparameters.n_epochs == 2
    assert job.metadata == {"seat": "12"}
    seen: list[str] = []
    answered_before = False
    deadline = time.monotonic() + 60
    while "The job has successfully completed" not in seen:
        assert time.monotonic() < deadline, seen
        seen = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=5)]
        status = client.fine_tuning.jobs.retrieve(job.id).status
        assert status in ("queued", "running", "succeeded")
        answered_before = answered_before or status == "succeeded"
        time.sleep(0.05)  # a client that asks without pause runs into its rate limit
    assert answered_before
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert (job.status, job.error) == ("succeeded", None)
    assert job.finished_at is not None
    assert job.fine_tuned_model is not None
    assert job.fine_tuned_model in [model.id for model in client.models.list()]
    answer = client.chat.completions.create(
        model=job.fine_tuned_model, messages=[{"role": "user", "content": "who are you"}]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("tuned", "stop")
    with client.chat.completions.create(
        model=job.fine_tuned_model,
        messages=[{"role": "user", "content": "who are you"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "tuned"
    assert chunks[-1].usage == answer.usage
    assert (
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        .choices[0]
        .message.content
        == "base"
    )
    steps = [event for event in client.fine_tuning.jobs.list_events(job.id, limit=100) if event.type == "metrics"]
    assert [event.data["step"] for event in steps] == [5, 4, 3, 2, 1]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [5, 4, 3, 2, 1]
    assert client.files.content(job.result_files[-1]).text.splitlines()[:2] == ["step,loss", "1,1.0"]
    assert client.models.retrieve(job.fine_tuned_model).id == job.fine_tuned_model
    assert client.models.delete(job.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(job.fine_tuned_model)


PAIR = {
    "input": {"messages": [{"role": "user", "content": "hi"}]},
    "preferred_output": [{"role": "assistant", "content": "yo"}],
    "non_preferred_output": [{"role": "assistant", "content": "no"}],
}
PAIRS = (json.dumps(PAIR) + "\n").encode() * 3


def test_dpo_is_gyms_own_dpo(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    pairs = client.files.create(file=("pairs.jsonl", PAIRS), purpose="fine-tune")
    hyperparameters = {"beta": 0.2, "n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=pairs.id,
        validation_file=pairs.id,
        suffix="steps-2",
        method={"type": "dpo", "dpo": {"hyperparameters": hyperparameters}},  # type: ignore[typeddict-item]
    )
    assert job.method is not None
    assert job.method.type == "dpo"
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.model_dump() == hyperparameters
    assert wait_for(client, job.id, "succeeded", "failed").fine_tuned_model is not None
    spec = json.loads((daemon.data_dir / "jobs" / job.id / "spec.json").read_text(encoding="utf-8"))
    assert spec["method"] == Dpo(beta=0.2).model_dump(mode="json")
    assert (spec["train"]["epochs"], spec["train"]["batch_size"], spec["train"]["learning_rate"]) == (2.0, 4, 1e-4)
    assert [source["source"].startswith(str(daemon.data_dir)) for source in spec["data"]["eval"]["sources"]] == [True]


def test_dpo_on_a_tuned_model_reaches_the_trainer_with_that_model_as_its_reference(
    daemon: DaemonProcess, client: openai.OpenAI
) -> None:
    chats = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    pairs = client.files.create(file=("pairs.jsonl", PAIRS), purpose="fine-tune")
    tuned = client.fine_tuning.jobs.create(model="tiny", training_file=chats.id, suffix="steps-1")
    tuned = wait_for(client, tuned.id, "succeeded", "failed")
    job = client.fine_tuning.jobs.create(
        model=tuned.fine_tuned_model or "",
        training_file=pairs.id,
        suffix="steps-1",
        method={"type": "dpo"},
    )
    assert wait_for(client, job.id, "succeeded", "failed").status == "succeeded"
    (path,) = (daemon.data_dir / "jobs" / job.id).glob("**/spec.yaml")
    spec = load_spec(path)
    assert spec.method == Dpo(beta=0.1)
    assert chosen_reference(spec) == "frozen_copy"
    records = list(read_records(spec.data.train[0]))
    assert [record.kind for record in records] == ["preference"] * 3
    assert [candidate.rank for candidate in records[0].candidates] == [0, 1]


def test_rows_of_another_kind_are_refused_before_the_job_is_queued(client: openai.OpenAI) -> None:
    pairs = client.files.create(file=("pairs.jsonl", PAIRS), purpose="fine-tune")
    chats = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    for file, method, words in ((pairs, "supervised", "one answer"), (chats, "dpo", "a better and a worse")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.fine_tuning.jobs.create(model="tiny", training_file=file.id, method={"type": method})  # type: ignore[typeddict-item]


def test_async_client_and_pages(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    names = [f"page-{n}.txt" for n in range(5)]
    ids = [client.files.create(file=(name, b"text"), purpose="user_data").id for name in names]

    async def list_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key) as own:
            return [file.id async for file in own.files.list(purpose="user_data", limit=2)]

    assert [file_id for file_id in asyncio.run(list_all()) if file_id in ids] == list(reversed(ids))
    ascending = [file.id for file in client.files.list(purpose="user_data", limit=2, order="asc")]
    assert [file_id for file_id in ascending if file_id in ids] == ids
    for file_id in ids:
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError, match=f"there is no file '{ids[0]}'"):
        client.files.retrieve(ids[0])


def test_uploads_in_parts(client: openai.OpenAI) -> None:
    content = b"".join(json.dumps({**ROW, "n": n}).encode() + b"\n" for n in range(5000))
    upload = client.uploads.upload_file_chunked(
        file=content,
        filename="big.jsonl",
        bytes=len(content),
        mime_type="text/jsonl",
        purpose="user_data",
        part_size=100_000,
    )
    assert upload.status == "completed"
    assert upload.file is not None
    assert client.files.content(upload.file.id).read() == content
    upload = client.uploads.create(bytes=4, filename="x.txt", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload.id, data=b"abcd")
    with pytest.raises(openai.BadRequestError, match="MD5"):
        client.uploads.complete(upload.id, part_ids=[part.id], md5="0" * 32)
    upload = client.uploads.create(bytes=5, filename="x.txt", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload.id, data=b"abcd")
    with pytest.raises(openai.BadRequestError, match="4 bytes together"):
        client.uploads.complete(upload.id, part_ids=[part.id])
    assert client.uploads.cancel(upload.id).status == "cancelled"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b'{"messages": [\n', "rows.jsonl:1"),
        (ROWS + b'{"messages": [{"role": "wizard", "content": "x"}, {"role": "assistant"}]}\n', "rows.jsonl:4"),
        (b"", "no rows"),
    ],
)
def test_training_data_is_refused_with_file_and_line(client: openai.OpenAI, rows: bytes, message: str) -> None:
    before = len(list(client.files.list()))
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
    assert message in refused.value.message
    assert refused.value.code == "invalid_file_format"
    assert len(list(client.files.list())) == before


def test_jobs_that_openai_would_take_and_gym_does_not_are_refused_in_its_form(client: openai.OpenAI) -> None:
    file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id, method={"type": "reinforcement"})
    assert (refused.value.code, refused.value.param, refused.value.type) == (
        "unsupported_value",
        "method.type",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-00'"):
        client.fine_tuning.jobs.create(model="tiny", training_file="file-00")
    with pytest.raises(openai.BadRequestError, match="may not be used"):
        client.fine_tuning.jobs.create(model="/etc/passwd", training_file=file.id)


def test_cancel_pause_and_resume_a_fine_tuning_job(client: openai.OpenAI) -> None:
    file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, suffix="waits")
    wait_for(client, job.id, "running")
    client.fine_tuning.jobs.pause(job.id)
    wait_for(client, job.id, "paused")
    client.fine_tuning.jobs.resume(job.id)
    wait_for(client, job.id, "running")
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"


def test_a_request_that_is_sent_again_makes_one_job_and_one_file(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    file = client.files.create(file=("again.jsonl", ROWS), purpose="fine-tune")
    body = {"model": "tiny", "training_file": file.id, "suffix": "steps-1"}
    again = {"x-stainless-retry-count": "1"}
    with daemon.http() as http:
        first = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        assert http.post("/v1/fine_tuning/jobs", json=body, headers=again).json()["id"] == first
        assert http.post("/v1/fine_tuning/jobs", json=body).json()["id"] != first
        form = {"files": {"file": ("again.jsonl", ROWS)}, "data": {"purpose": "fine-tune"}}
        assert http.post("/v1/files", **form, headers=again).json()["id"] == file.id
        assert http.post("/v1/files", **form).json()["id"] != file.id


def test_what_of_a_prompt_was_read_before_is_told(client: openai.OpenAI) -> None:
    """Also where a stop string ends the answer, and once for several answers to one prompt."""
    for content, options in (
        ("cached:17 say:yes", {}),
        ("cached:17 say:yesENDno", {"stop": "END"}),
        ("cached:17", {"n": 3}),
    ):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": content}], **options}
        usage = client.chat.completions.create(**asked).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 17
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        assert list(stream)[-1].usage == usage
    usage = client.completions.create(model="tiny", prompt=["user\ncached:5", "user\ncached:6"]).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 11


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["user\nsay:one", "user\nsay:two"], max_tokens=8, n=2)
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    with client.completions.create(model="tiny", prompt="user\nsay:three", max_tokens=8, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "three"


def test_a_failure_of_a_completion_is_that_failure(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=["user\nsay:one", "x" * 5000])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError) as crashed:
        client.completions.create(model="tiny", prompt="user\ncrash")
    assert (crashed.value.status_code, crashed.value.code) == (503, "engine_down")


def test_several_answers_logprobs_and_stop_strings(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say:helloENDworld"}],
        n=3,
        stop=["END"],
        logprobs=True,
        top_logprobs=1,
    )
    assert [choice.message.content for choice in answer.choices] == ["hello"] * 3
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content][:5] == list("hello")
    assert logprobs.content[0].bytes == [ord("h")]
    with client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "say:helloENDworld"}], stop="END", stream=True
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"


def test_errors_are_in_openais_form(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="tinny", messages=[{"role": "user", "content": "x"}])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert "did you mean tiny?" in missing.value.message
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert long.value.code == "context_length_exceeded"
    assert "5019 tokens" in long.value.message
    assert "4096" in long.value.message
    cases: list[tuple[dict[str, object], str]] = [
        ({"model": "tiny", "messages": []}, "messages"),
        ({"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 3}, "temperature"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "hotness": 1}, "hotness"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream_options": {}}, None),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]}, "modalities"),
        ({"model": "tiny"}, "messages"),
    ]
    with daemon.http() as http:
        for body, param in cases:
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == param
        assert http.post("/v1/chat/completions", content=b"{").status_code == 400
        assert http.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
        assert http.put("/v1/models").status_code == 405
        assert http.get("/healthz", headers={"x-request-id": "my-own-id"}).headers["x-request-id"] == "my-own-id"


def test_a_failure_in_the_middle_of_a_stream_is_an_error_frame_and_no_done(daemon: DaemonProcess) -> None:
    with (
        daemon.http() as http,
        http.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "crash"}], "stream": True},
        ) as response,
    ):
        assert response.status_code == 200
        frames = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    error = json.loads(frames[-1])["error"]
    assert (error["code"], error["type"]) == ("engine_down", "server_error")
    assert "the stand-in has crashed" in error["message"]
    assert "[DONE]" not in frames
    # The engine is started anew for the next request.
    own = openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key, max_retries=0)
    answer = own.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say:back"}])
    assert answer.choices[0].message.content == "back"
    with pytest.raises(openai.InternalServerError, match="send the request again"):
        own.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "crash"}])


def test_a_deadline_ends_an_answer(daemon: DaemonProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hang"}]}
    with daemon.http() as http:
        response = http.post("/v1/chat/completions", json=body, headers={"x-request-timeout-s": "0.1"})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timed_out"
        assert engine_running(http) == 0


def engine_running(http: httpx.Client) -> float:
    text = http.get("/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("gym_engine_running "))


def test_range_requests_go_on_where_a_download_broke_off(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    content = bytes(range(256)) * 1000
    file = client.files.create(file=("bytes.bin", content), purpose="user_data")
    path = f"/v1/files/{file.id}/content"
    with daemon.http() as http:
        whole = http.get(path)
        assert whole.content == content
        rest = http.get(path, headers={"range": "bytes=100000-", "if-range": whole.headers["etag"]})
        assert (rest.status_code, rest.content) == (206, content[100000:])
        assert rest.headers["content-range"] == f"bytes 100000-{len(content) - 1}/{len(content)}"
        assert http.get(path, headers={"range": "bytes=-10"}).content == content[-10:]
        assert http.get(path, headers={"range": "bytes=999999-"}).status_code == 416
        changed = http.get(path, headers={"range": "bytes=5-", "if-range": '"other"'})
        assert (changed.status_code, len(changed.content)) == (200, len(content))


def test_metrics_need_an_admins_key_and_count(daemon: DaemonProcess) -> None:
    with daemon.http() as http:
        text = http.get("/metrics").text
    for name in (
        "gym_requests_total",
        "gym_generated_tokens_total",
        "gym_time_to_first_token_seconds",
        "gym_jobs_queued",
    ):
        assert name in text
