"""A vLLM server for tests: its HTTP API without an engine, every body checked against vLLM's own protocol models.

Started as `vllm serve FOLDER --host H --port P ...` would be, or in a thread. The schemas in `data/vllm-protocol.json`
are those of the models in vLLM's wheel (see `vllm_protocol.py`). A request field that vLLM does not know is an error
here (vLLM ignores it in silence), and so is an answer of ours that its models would not have written.

The next token of a request is a function of its whole prompt, adapter and seed, so that a mixed-up answer shows:
`next_token`. Prompts that begin with the token ids `HANG` or `CRASH` hang or end the process.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PROTOCOL = json.loads((Path(__file__).with_name("data") / "vllm-protocol.json").read_text(encoding="utf-8"))["schemas"]
HANG, CRASH, FAIL = 3, 4, 5
CONTEXT_LENGTH = 256
VOCAB_SIZE = 259


def next_token(ids: list[int], adapter: str, seed: int | None) -> int:
    """What the stand-in says next."""
    text = f"{ids}|{adapter}|{seed}"
    return 6 + int(hashlib.sha256(text.encode()).hexdigest(), 16) % (VOCAB_SIZE - 6)


def expected_answer(ids: list[int], adapter: str, seed: int | None, count: int) -> list[int]:
    """The tokens of an answer that no stop id ends."""
    all_ids = list(ids)
    for _ in range(count):
        all_ids.append(next_token(all_ids, adapter, seed))
    return all_ids[len(ids) :]


def check(model: str, value: dict[str, Any]) -> None:
    """Against one of vLLM's models, unknown fields included."""
    schema = PROTOCOL[model]
    jsonschema.Draft202012Validator(schema).validate(value)
    if unknown := value.keys() - schema["properties"].keys():
        raise jsonschema.ValidationError(f"{model} has no field {sorted(unknown)}")


class StandInVllm:
    """The server's state and routes."""

    def __init__(self, base_name: str, api_key: str = "", *, loads_adapters: bool = True) -> None:
        self.base_name = base_name
        self.api_key = api_key
        self.adapters: dict[str, str] = {}
        self.num_open = 0
        self.bodies: list[dict[str, Any]] = []
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        if loads_adapters:
            routes += [
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            ]
        self.app = Starlette(routes=routes, exception_handlers={404: no_route})

    def refuse(self, request: Request) -> Response | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return None

    async def health(self, request: Request) -> Response:
        return Response()

    async def models(self, request: Request) -> Response:
        if refused := self.refuse(request):
            return refused
        data = [{"id": self.base_name, "max_model_len": CONTEXT_LENGTH, "root": "folder"}]
        data += [{"id": name, "root": path, "parent": self.base_name} for name, path in self.adapters.items()]
        listing = {"object": "list", "data": data}
        check("ModelList", listing)
        return JSONResponse(listing)

    async def load(self, request: Request) -> Response:
        if refused := self.refuse(request):
            return refused
        body = await request.json()
        check("LoadLoRAAdapterRequest", body)
        if body["lora_name"] in self.adapters:
            return error(f"The lora adapter '{body['lora_name']}' has already been loaded.", 400)
        if not (Path(body["lora_path"]) / "adapter_config.json").is_file():
            return error("No adapter found for that path", 404)
        if json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())["r"] > 64:
            return error("LoRA rank 65 is greater than max_lora_rank 64.", 500)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return Response("Success")

    async def unload(self, request: Request) -> Response:
        body = await request.json()
        check("UnloadLoRAAdapterRequest", body)
        if self.adapters.pop(body["lora_name"], None) is None:
            return error("The lora adapter cannot be found.", 404)
        return Response("Success")

    async def completions(self, request: Request) -> Response:
        if refused := self.refuse(request):
            return refused
        body = await request.json()
        try:
            check("CompletionRequest", body)
        except jsonschema.ValidationError as wrong:
            return error(wrong.message, 400)
        self.bodies.append(body)
        if body["model"] not in (self.base_name, *self.adapters):
            return error(f"The model `{body['model']}` does not exist.", 404)
        if len(body["prompt"]) + body["max_tokens"] > CONTEXT_LENGTH:
            return error("This model's maximum context length is exceeded", 400)
        return StreamingResponse(self.stream(request, body), media_type="text/event-stream")

    async def stream(self, request: Request, body: dict[str, Any]) -> AsyncIterator[str]:
        ids = list(body["prompt"])
        self.num_open += 1
        try:
            if ids[0] == CRASH:
                os._exit(7)
            if ids[0] == FAIL:
                failure = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
                check("ErrorResponse", failure)
                yield f"data: {json.dumps(failure)}\n\ndata: [DONE]\n\n"
                return
            for count in range(1, body["max_tokens"] + 1):
                await asyncio.sleep(0.002)
                if ids[0] == HANG and count > 3:
                    while not await request.is_disconnected():
                        await asyncio.sleep(0.01)
                    return
                adapter = "" if body["model"] == self.base_name else body["model"]
                ids.append(next_token(ids, adapter, body.get("seed")))
                stopped = ids[-1] in body["stop_token_ids"]
                finish = "stop" if stopped else "length" if count == body["max_tokens"] else None
                choice: dict[str, Any] = {"index": 0, "text": "?", "finish_reason": finish, "token_ids": ids[-1:]}
                if "logprobs" in body:
                    choice["logprobs"] = self.logprobs(ids[-1], body["logprobs"])
                chunk = {"id": "cmpl-1", "model": body["model"], "choices": [choice]}
                check("CompletionStreamResponse", chunk)
                yield f"data: {json.dumps(chunk)}\n\n"
                if finish:
                    break
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = {
                    "prompt_tokens": len(body["prompt"]),
                    "completion_tokens": count,
                    "total_tokens": len(ids),
                    "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 16 * 16},
                }
                chunk = {"id": "cmpl-1", "model": body["model"], "choices": [], "usage": usage}
                check("CompletionStreamResponse", chunk)
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.num_open -= 1

    @staticmethod
    def logprobs(token_id: int, top: int) -> dict[str, Any]:
        """The drawn token third, as vLLM writes them: it first, then the likeliest."""
        others = {f"token_id:{10 + rank}": math.log(0.5 / (rank + 1)) for rank in range(top)}
        return {
            "tokens": [f"token_id:{token_id}"],
            "token_logprobs": [-3.5],
            "top_logprobs": [{f"token_id:{token_id}": -3.5, **others}],
            "text_offset": [0],
        }


async def no_route(request: Request, exception: Exception) -> Response:
    return JSONResponse({"detail": "Not Found"}, status_code=404)  # as FastAPI says it


def error(message: str, status: int) -> Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    check("ErrorResponse", body)
    return JSONResponse(body, status_code=status)


class ServerThread:
    """The stand-in on a loopback port of this process, as a server that someone else runs."""

    def __init__(self, state: StandInVllm, port: int = 0) -> None:
        self.state = state
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(state.app, log_level="error", lifespan="off", ws="none"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Every connection is cut."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    options, rest = parser.parse_known_args()
    assert (options.folder / "config.json").is_file()
    (options.folder / "vllm.json").write_text(json.dumps({"arguments": rest, "pid": os.getpid()}), encoding="utf-8")
    if "--refuse" in rest:
        raise SystemExit(3)
    state = StandInVllm(
        options.served_model_name,
        os.environ["VLLM_API_KEY"],
        loads_adapters=os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1",
    )
    uvicorn.run(state.app, host=options.host, port=options.port, log_level="error", lifespan="off", ws="none")


if __name__ == "__main__":
    main()
