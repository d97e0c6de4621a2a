"""Guards the HTTP document: it names every route, and no generated request to any of them is a 500."""

from __future__ import annotations

import re

import pytest
import schemathesis
from daemon_process import DaemonProcess
from hypothesis import HealthCheck, Phase, settings
from jsonschema import Draft202012Validator

from gym_serve.daemon import Daemon
from gym_serve.http.openapi import OPERATIONS, build_document
from gym_serve.settings import load_settings

DOCUMENT = build_document(OPERATIONS)
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
CASES_AN_OPERATION = 40
KEPT_OUT = ("DELETE", "/v1/models/{model_id}")
"""It would take the other cases' model away."""


def test_the_document_names_every_route(tmp_path) -> None:
    daemon = Daemon(
        load_settings(None, {"server": {"data_dir": str(tmp_path)}, "engine": {"kind": "stand_in_engine:start"}})
    )
    routed = {
        (method.lower(), re.sub(r":path\}", "}", route.path))
        for route in daemon.http_app().routes
        for method in route.methods or ()
        if method != "HEAD" and not route.path.startswith("/gym.v1.")
    }
    assert routed == {(method, path) for path, calls in DOCUMENT["paths"].items() for method in calls}
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_document_is_served_to_whoever_has_a_key(shared_daemon: DaemonProcess) -> None:
    with shared_daemon.http() as http:
        assert http.get("/openapi.json").json() == DOCUMENT
        assert http.get("/openapi.json", headers={"authorization": ""}).status_code == 401


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(
    max_examples=CASES_AN_OPERATION,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_no_generated_request_is_a_500(case: schemathesis.Case, shared_daemon: DaemonProcess) -> None:
    if (case.method, case.path) == KEPT_OUT:
        return
    if isinstance(case.body, dict) and len(repr(case.body)) % 2:
        # Past the first refusals: a model that is there, and a chat that can be answered.
        case.body.update({"model": "tiny"} if "model" in case.body else {})
        case.body.update({"messages": [{"role": "user", "content": "hi"}]} if "messages" in case.body else {})
    response = case.call(
        base_url=shared_daemon.http_url, headers={"authorization": f"Bearer {shared_daemon.key}"}, timeout=20
    )
    # 503: the part that is not ready says so; a model that is being loaded, or an engine that fails on purpose.
    assert response.status_code != 500, response.text
    if response.status_code >= 400 and response.status_code != 503:
        Draft202012Validator(DOCUMENT["components"]["schemas"]["Error"]).validate(response.json())
