"""The client's side of gym.v1: channels, retries, errors."""

from __future__ import annotations

from gym_sdk.client._options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS, local_key_path

__all__ = ["CHANNEL_OPTIONS", "MAX_MESSAGE_BYTES", "SERVER_OPTIONS", "local_key_path"]
