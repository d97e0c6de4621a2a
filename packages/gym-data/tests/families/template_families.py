"""Template families with small tokenizers of their own, and chats to mask."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from gym_data import Record, Source, Tokenizer
from gym_data.formats import format_named

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"

_TOKENS = re.compile(
    r"<\|[^<>|\s]+\|>|</?s>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>|</?think>|</?tool_call>|</?tool_response>"
    r"|</?arg_(?:key|value)>|<(?:start|end)_of_turn>|<start_of_image>"
)
_ORDINARY = ("think", "tool_", "arg_", "｜User｜", "｜Assistant｜")
"""Added tokens that their tokenizers do not flag as special."""


@dataclass(frozen=True)
class Family:
    """A template file and the named tokens of its tokenizer."""

    name: str
    bos: str | None = None
    eos: str = "<|im_end|>"
    more_eos: tuple[str, ...] = ()
    arguments_as_text: bool = False

    def source(self, suffix: str = "") -> str:
        """The template."""
        return (TEMPLATES / f"{self.name}{suffix}.jinja").read_text(encoding="utf-8")

    @cache  # noqa: B019 - a handful of families
    def backend(self) -> tokenizers.Tokenizer:
        """A small byte-level tokenizer with the family's control tokens."""
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        backend.train_from_iterator(["the answer is four, two and two, what be brief hello it is ok"] * 3, trainer)
        names = set(_TOKENS.findall(self.source())) | {self.eos, *self.more_eos} | ({self.bos} if self.bos else set())
        for name in sorted(names):
            special = not any(part in name for part in _ORDINARY)
            token = AddedToken(name, special=special, normalized=False)
            (backend.add_special_tokens if special else backend.add_tokens)([token])
        return backend

    def named_tokens(self) -> dict[str, str]:
        """`bos_token` and `eos_token`."""
        return {"eos_token": self.eos, **({"bos_token": self.bos} if self.bos else {})}

    def tokenizer(self, suffix: str = "") -> Tokenizer:
        """Gym's tokenizer of the family."""
        backend = self.backend()
        return Tokenizer(
            backend.to_str(),
            named_tokens=self.named_tokens(),
            eos_ids=[backend.token_to_id(token) for token in self.more_eos],
            chat_templates={"default": self.source(suffix)},
        )

    def stock(self, suffix: str = "") -> Any:
        """transformers' tokenizer of the family."""
        from transformers import PreTrainedTokenizerFast

        stock = PreTrainedTokenizerFast(tokenizer_object=self.backend(), **self.named_tokens())
        stock.chat_template = self.source(suffix)
        return stock


_DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "arguments_as_text": True}

FAMILIES = {
    family.name: family
    for family in (
        Family("chatml"),
        Family("qwen2_5"),
        Family("qwen3"),
        Family("llama3", "<|begin_of_text|>", "<|eot_id|>"),
        Family("llama3_1", "<|begin_of_text|>", "<|eot_id|>", ("<|eom_id|>",)),
        Family("llama4", "<|begin_of_text|>", "<|eot|>", ("<|eom|>",)),
        Family("mistral", "<s>", "</s>"),
        Family("gemma", "<bos>", "<eos>", ("<end_of_turn>",)),
        Family("gemma3", "<bos>", "<eos>", ("<end_of_turn>",)),
        Family("phi3", "<s>", "<|endoftext|>", ("<|end|>",)),
        Family("deepseekv3", **_DEEPSEEK),
        Family("glm4moe", None, "<|endoftext|>", ("<|user|>", "<|observation|>")),
        Family("cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        Family("cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        Family("gptoss", "<|startoftext|>", "<|return|>", ("<|call|>",)),
    )
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number", "description": "a number"}},
                "required": ["a"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call0000{number}", "function": {"name": "add", "arguments": arguments}}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "add", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: dict[str, dict[str, Any]] = {
    "two_turns": {"messages": [user("1+1?"), assistant("2"), user("and 2+2?"), assistant("4")]},
    "system": {"messages": [SYSTEM, user("1+1?"), assistant("2"), user("and 2+2?"), assistant("4")]},
    "reasoning": {
        "messages": [
            user("1+1?"),
            assistant("2", reasoning_content="one, one"),
            user("and 2+2?"),
            assistant("4", reasoning_content="two, two"),
        ]
    },
    "spaces": {"messages": [user(" 1+1? "), assistant("\n 2 \n"), user("and 2+2?"), assistant("4\n")]},
    "empty_answer": {"messages": [user("1+1?"), assistant(""), user("and 2+2?"), assistant("4")]},
    "tool": {
        "messages": [
            user("1+1?"), assistant(None, call(1, a=1, b="x")), result(1, "2"), assistant("It is 2."),
            user("ok?"), assistant("yes"),
        ],
        "tools": TOOLS,
    },
    "parallel_tools": {
        "messages": [
            user("1+1?"), assistant("Wait.", call(1, a=1), call(2, a=2)), result(1, "2"), result(2, "3"),
            assistant("It is 2."),
        ],
        "tools": TOOLS,
    },
}  # fmt: skip


def record_of(row: dict[str, Any]) -> Record:
    return format_named("openai").to_record(row, Source("rows.jsonl", "openai", 1))
