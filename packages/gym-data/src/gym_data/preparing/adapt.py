"""What a data specification changes in a chat before it is rendered."""

from __future__ import annotations

from pathlib import Path

from gym_data.record import MEDIA_TYPES, Message, Part, Record
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSpec


def template_of(data: DataSpec) -> str | None:
    """The text of `data.chat_template`."""
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"the chat template cannot be read: {reason}",
            where=Where(file=data.chat_template, path="data.chat_template"),
            hint="name a Jinja file in UTF-8, or leave it out for the model's own template",
        ) from None


def adapted(messages: tuple[Message, ...], data: DataSpec, record: Record) -> tuple[Message, ...]:
    """Messages as `data.thinking` and `data.system` want them."""
    if data.thinking == "drop":
        messages = tuple(
            message._replace(parts=tuple(part for part in message.parts if part.type != "reasoning"))
            for message in messages
        )
    systems = [message for message in messages if message.role in ("system", "developer")]
    if data.system == "template" or not systems:
        return messages
    rest = tuple(message for message in messages if message.role not in ("system", "developer"))
    if data.system == "drop":
        return rest
    first = next((i for i, message in enumerate(rest) if message.role == "user"), None)
    if first is None:
        raise row_error(record, "there is no user's turn to merge the system turn into")
    text = "\n\n".join(message.text for message in systems)
    merged = rest[first]._replace(parts=(Part("text", f"{text}\n\n"), *rest[first].parts))
    return (*rest[:first], merged, *rest[first + 1 :])


def refuse_media(record: Record) -> None:
    """Raises DataError for a row with images, audio or video."""
    for messages in (record.prompt, *[candidate.messages for candidate in record.candidates]):
        for message in messages:
            for part in message.parts:
                if part.type in MEDIA_TYPES:
                    raise row_error(
                        record,
                        f"the row has {part.type} content, which is not trained on",
                        "Such rows can be inspected, validated, converted and split; take them out before training.",
                    )


def row_error(record: Record, message: str, hint: str | None = None) -> DataError:
    """An error about a row, with its place."""
    place = Where(file=record.source.uri, line=record.source.row) if record.source else None
    return DataError(message, where=place, hint=hint)
