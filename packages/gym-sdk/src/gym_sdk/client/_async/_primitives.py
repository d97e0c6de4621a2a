"""Waiting and working aside, as the asynchronous client does it. `_sync/_primitives.py` is its twin, by hand."""

from __future__ import annotations

from asyncio import sleep, to_thread

__all__ = ["sleep", "to_thread"]
