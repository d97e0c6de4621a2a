"""Chat with a base model or any of its adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self, Unpack

from gym_sdk._proto.gym.v1 import inference_pb2 as pb
from gym_sdk.client._async.caller import AsyncCaller
from gym_sdk.client._chat_convert import MessageInput, chat_chunk, chat_completion, chat_input
from gym_sdk.client._retry import COSTLY
from gym_sdk.client.chat_types import ChatChunk, ChatCollector, ChatCompletion, ChatOptions

CHAT_TIMEOUT_S = 600.0


class AsyncChat:
    """Chat answers."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def create(
        self,
        model: str,
        messages: str | Iterable[MessageInput],
        *,
        timeout_s: float | None = CHAT_TIMEOUT_S,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """The whole answer to a chat: `(await gym.chat.create("base", "Hello")).text`.

        `messages` is one user turn's text, or turns as ChatMessage or as `openai`-style dicts. Sent again where the
        daemon has not begun, and twice more where the line broke: generation changes nothing, but costs.
        """
        request = pb.CreateChatCompletionRequest(input=chat_input(model, messages, **options))
        answer = await self._caller.unary(
            "InferenceService/CreateChatCompletion",
            request,
            pb.CreateChatCompletionResponse,
            repeat=COSTLY,
            timeout_s=timeout_s,
        )
        return chat_completion(answer)

    def stream(
        self,
        model: str,
        messages: str | Iterable[MessageInput],
        *,
        timeout_s: float | None = CHAT_TIMEOUT_S,
        **options: Unpack[ChatOptions],
    ) -> AsyncChatStream:
        """The answer in pieces as it is made. Closing the stream ends the generation.

        Until its first piece has come it is sent again as `create` is; after that a broken line is `Unavailable`.

        async with gym.chat.stream("base", "Hello") as stream:
            async for chunk in stream:
                print(chunk.text, end="")
        """
        request = pb.StreamChatCompletionRequest(input=chat_input(model, messages, **options))
        messages_ = self._caller.stream(
            "InferenceService/StreamChatCompletion",
            request,
            pb.StreamChatCompletionResponse,
            repeat=COSTLY,
            timeout_s=timeout_s,
        )
        return AsyncChatStream(messages_)

    async def count_tokens(
        self, model: str, messages: str | Iterable[MessageInput], **options: Unpack[ChatOptions]
    ) -> int:
        """How many tokens the model would read, without generating."""
        request = pb.TokenizeChatRequest(input=chat_input(model, messages, **options))
        answer = await self._caller.unary("InferenceService/TokenizeChat", request, pb.TokenizeChatResponse)
        return len(answer.token_ids)


class AsyncChatStream:
    """The pieces of an answer. Iterate once."""

    def __init__(self, messages: AsyncIterator[pb.StreamChatCompletionResponse]) -> None:
        self._messages = messages
        self._collector = ChatCollector()
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[ChatChunk]:
        try:
            async for message in self._messages:
                chunk = chat_chunk(message)
                self._collector.add(chunk)
                yield chunk
        finally:
            await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the generation."""
        # Python may end the iteration of a loop that was left by an error while the context manager closes the stream.
        if not self._closed:
            self._closed = True
            await self._messages.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def collect(self) -> ChatCompletion:
        """Read to the end; returns the whole answer."""
        async for _ in self:
            pass
        return self._collector.completion()

    def so_far(self) -> ChatCompletion:
        """The answer as far as it was read."""
        return self._collector.completion()
