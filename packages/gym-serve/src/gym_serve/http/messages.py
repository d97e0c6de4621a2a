"""OpenAI's chat requests in the words of `gym_serve.inference`, field by field: what cannot be honoured is refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gym_data.formats._base import RowError
from gym_data.formats.openai import messages_from_openai
from gym_serve.errors import Reason, ServiceError, invalid
from gym_serve.inference import ChatRequest, CompletionRequest
from gym_serve.inference.requests import ResponseFormat

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed"),
)
Stop = Annotated[str, Field(max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    include_usage: bool | None = False
    include_obfuscation: bool | None = None


class GenerationBody(BaseModel):
    """What chat and completions have in common. Behind OpenAI's own fields stand those that vLLM made common."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(min_length=1, max_length=500)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None

    # For OpenAI's own books; they change nothing about an answer.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """The sampling fields that were given."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            if not all(token.isdigit() and len(token) < 10 for token in self.logit_bias):
                raise invalid("the keys of logit_bias are token ids", field="logit_bias")
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class JsonSchema(BaseModel):
    """`response_format.json_schema`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Format(BaseModel):
    """`response_format`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """An item of `tools`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(BaseModel):
    """The function of a `tool_choice`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    name: str


class NamedTool(BaseModel):
    """A `tool_choice` of one tool."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Format | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_request(self) -> ChatRequest:
        """The request. Raises `ServiceError` for what this daemon does not do."""
        if self.modalities not in (None, ["text"]):
            raise _unsupported("answers are text only", "modalities")
        if self.verbosity is not None:
            raise _unsupported("verbosity is not offered; say it in the messages", "verbosity")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", field="top_logprobs")
        try:
            messages, _ = messages_from_openai(self.messages)
        except RowError as error:
            raise invalid(f"{error.path}: {error.message}", field=error.path, hint=error.hint) from None
        choice = self.tool_choice or ("auto" if self.tools else "none")
        if self.tools is None and choice not in ("none", "auto"):
            raise invalid("tool_choice needs tools", field="tool_choice")
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatRequest(
            messages=messages,
            tools_json=_tools_json(self.tools) if self.tools else None,
            tool_choice=choice.function.name if isinstance(choice, NamedTool) else choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_variables=variables,
            sampling=self.sampling(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop_strings(),
            n=self.n or 1,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            response_format=_response_format(self.response_format),
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: Format | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each to be continued by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("prompt is empty", field="prompt")
        if isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    def to_request(self, prompt: str | list[int]) -> CompletionRequest:
        """The request to continue one prompt."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _unsupported("best_of is not offered; n gives several answers", "best_of")
        if self.suffix is not None:
            raise _unsupported("suffix is not offered", "suffix")
        return CompletionRequest(
            prompt=prompt,
            echo=bool(self.echo),
            sampling=self.sampling(),
            max_tokens=self.max_tokens or 16,
            stop=self.stop_strings(),
            n=self.n or 1,
            top_logprobs=self.logprobs,
            response_format=_response_format(self.response_format),
        )


def _tools_json(tools: list[Tool]) -> str:
    return json.dumps([tool.model_dump(exclude_unset=True) for tool in tools], ensure_ascii=False)


def _response_format(given: Format | None) -> ResponseFormat:
    if given is None:
        return ResponseFormat()
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema_ is None:
            raise invalid("json_schema needs a schema", field="response_format.json_schema.schema")
        return ResponseFormat(kind="json_schema", schema_json=json.dumps(given.json_schema.schema_, ensure_ascii=False))
    return ResponseFormat(kind=given.type)


def _unsupported(message: str, field: str) -> ServiceError:
    return ServiceError(Reason.REQUEST_INVALID, message, field=field, openai_code="unsupported_value")
