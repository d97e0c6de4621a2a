"""A model as people use it: chats and texts in, answers out.

The prompt of a chat is made by the renderer that training uses (`gym_data.ChatRenderer`), so a served model sees what
it was trained on. An adapter's folder that holds a tokenizer, chat template or generation config of its own wins over
its base.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_data import ChatRenderer, Tokenizer
from gym_data.experience import ExperienceLibrary
from gym_sdk.errors import DataError
from gym_serve.engines.base import Engine, GenerationRequest, PromptTooLong, RequestRefused, SamplingParams
from gym_serve.inference.answers import AnswerStream, Delta, ReaderSettings, Usage
from gym_serve.inference.requests import ChatRequest, CompletionRequest, GenerationSettings, ResponseFormat
from gym_serve.inference.tools import Family, family_of

__all__ = ["ChatModel", "ChatRequest", "CompletionRequest", "Delta", "ResponseFormat", "Usage"]

MAX_ANSWERS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
_DEFAULT_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ChatModel:
    """An engine's base model, or one of its adapters, with its tokenizer and template."""

    def __init__(
        self, engine: Engine, folder: Path, *, adapter: str | None = None, adapter_folder: Path | None = None
    ) -> None:
        """`folder` is the base model's; `adapter` the content id of one loaded in the engine, from `adapter_folder`."""
        self.engine: Engine = engine
        self.adapter: str | None = adapter
        self.experiences: ExperienceLibrary | None = None
        """Lessons that stand in front of every chat."""
        folders = [folder] if adapter_folder is None else [adapter_folder, folder]
        self.tokenizer: Tokenizer = Tokenizer.from_folder(
            next((f for f in folders if (f / "tokenizer.json").is_file()), folder)
        )
        own = folders[0] / "chat_template.jinja"
        template = own.read_text(encoding="utf-8") if own.is_file() else self.tokenizer.chat_template
        self._renderer: ChatRenderer | None = None
        if template is not None:
            # The tokenizer's other templates (tool_use) go with its own default, not with an adapter's.
            replaces = template != self.tokenizer.chat_template
            self._renderer = ChatRenderer(self.tokenizer, template=template if replaces else None)
        generation: dict[str, Any] = {}
        for place in reversed(folders):
            generation |= _generation_config(place)
        self._defaults = {name: generation[name] for name in _DEFAULT_SETTINGS if generation.get(name) is not None}
        eos = generation.get("eos_token_id")
        self._eos_ids = tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
        template = template or ""
        self._family: Family | None = family_of(template + (self.tokenizer.chat_templates.get("tool_use") or ""))
        self._thinks = "<think>" in template or "</think>" in template

    def with_experiences(self, library: ExperienceLibrary) -> ChatModel:
        """The same model behind a library of experiences."""
        behind = copy.copy(self)
        behind.experiences = library
        return behind

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        own = self._renderer.stop_ids if self._renderer else self.tokenizer.eos_ids
        return frozenset([*map(int, own), *self._eos_ids])

    def tokenize(self, request: ChatRequest) -> list[int]:
        """The prompt's ids, exactly as they would be given to the model.

        Raises:
            RequestRefused: the template cannot render the chat (an unknown role, a tool without a place), there is
                no template, or the library of experiences has no place in the chat.
        """
        if self._renderer is None:
            raise RequestRefused(
                "this model has no chat template", hint="use completions, or an instruction-tuned model"
            )
        uses_tools = request.tools_json is not None and request.tool_choice != "none"
        if uses_tools and self._family is None:
            raise RequestRefused("this model's chat template has no place for tools")
        messages = request.messages
        if self.experiences is not None:
            try:
                messages = self.experiences.place_messages(messages)
            except ValueError as error:
                raise RequestRefused(str(error)) from None
        try:
            return self._renderer.encode_prompt(
                messages, request.tools_json if uses_tools else None, **request.template_variables
            )
        except DataError as error:
            raise RequestRefused(error.message, hint=error.hint) from error

    def chat(self, request: ChatRequest) -> AnswerStream:
        """Start answering a chat.

        Raises:
            RequestRefused: as `tokenize`; PromptTooLong; a setting out of range; a grammar that cannot be held.
        """
        ids = self.tokenize(request)
        tools = json.loads(request.tools_json) if request.tools_json and request.tool_choice != "none" else []
        forced = bool(tools) and request.tool_choice not in ("auto", "none")
        grammar = _grammar(request.response_format)
        if forced:
            grammar = _call_schema(tools, request.tool_choice, parallel=request.parallel_tool_calls)
        opens_thought = self._thinks and self._opens_thought(ids)
        settings = ReaderSettings(
            tokenizer=self.tokenizer,
            stop=request.stop,
            stop_ids=self.stop_ids,
            thinks=self._thinks and grammar is None,
            starts_thinking=opens_thought and grammar is None,
            family=self._family if tools and not forced else None,
            forced_call=forced,
        )
        return AnswerStream(self._submit(ids, request, grammar), settings)

    def complete(self, request: CompletionRequest) -> AnswerStream:
        """Start continuing a text. Raises RequestRefused as `chat` does, and for a library of experiences, whose place
        is in a chat."""
        if self.experiences is not None:
            raise RequestRefused("a library of experiences has its place in chats", hint="use chat completions")
        if isinstance(request.prompt, str):
            ids = self.tokenizer.encode(request.prompt)
            if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None:
                ids = [self.tokenizer.bos_id, *ids]
        else:
            ids = list(request.prompt)
        settings = ReaderSettings(
            tokenizer=self.tokenizer,
            stop=request.stop,
            stop_ids=frozenset([*map(int, self.tokenizer.eos_ids), *self._eos_ids]),
        )
        before: Sequence[Delta] = ()
        if request.echo:
            text = request.prompt if isinstance(request.prompt, str) else self.tokenizer.decode(ids)
            before = [Delta(i, text) for i in range(request.n)]
        streams = self._submit(ids, request, _grammar(request.response_format), settings.stop_ids)
        return AnswerStream(streams, settings, before=before)

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """The client's settings over the model's own defaults. Raises RequestRefused for a value out of range."""
        return SamplingParams(**{**self._defaults, **given})

    def _submit(
        self,
        ids: Sequence[int],
        request: GenerationSettings,
        grammar: str | None,
        stop_ids: frozenset[int] | None = None,
    ) -> list[Any]:
        if not 1 <= request.n <= MAX_ANSWERS:
            raise RequestRefused(f"n is {request.n}; it lies between 1 and {MAX_ANSWERS}")
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestRefused(f"top_logprobs is {request.top_logprobs}; it lies between 0 and {MAX_TOP_LOGPROBS}")
        if len(request.stop) > MAX_STOPS:
            raise RequestRefused(f"there are {len(request.stop)} stop strings; at most {MAX_STOPS} are allowed")
        if len(ids) >= self.engine.context_length:  # before n requests are queued
            raise PromptTooLong(len(ids), self.engine.context_length)
        sampling = self.sampling(request.sampling)
        streams: list[Any] = []
        try:
            for i in range(request.n):
                seeded = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + i)
                streams.append(
                    self.engine.submit(
                        GenerationRequest(
                            prompt_ids=ids,
                            max_tokens=request.max_tokens,
                            stop_ids=self.stop_ids if stop_ids is None else stop_ids,
                            adapter=self.adapter,
                            sampling=seeded,
                            top_logprobs=request.top_logprobs,
                            grammar=grammar,
                        )
                    )
                )
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    def _opens_thought(self, ids: Sequence[int]) -> bool:
        """Whether the generation prompt itself has opened the reasoning (DeepSeek-R1, QwQ)."""
        tail = self.tokenizer.decode(ids[-16:])
        return tail.rfind("<think>") > tail.rfind("</think>")


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _grammar(form: ResponseFormat) -> str | None:
    if form.kind == "json_object":
        return '{"type": "object"}'
    if form.kind == "json_schema":
        text = (form.schema_json or "").strip()
        if not text.startswith("{"):
            raise RequestRefused("response_format has no schema that is a JSON object")
        return text
    return form.lark if form.kind == "lark" else None


def _call_schema(tools: Sequence[Any], choice: str, *, parallel: bool) -> str:
    """The schema of an answer that must be tool calls."""
    functions = [tool["function"] for tool in tools if choice == "required" or tool["function"]["name"] == choice]
    if not functions:
        raise RequestRefused(f"tool_choice names {choice}, which is not among the tools")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    many = choice == "required" and parallel
    return json.dumps({"type": "array", "items": call, "minItems": 1, "maxItems": 16} if many else call)
