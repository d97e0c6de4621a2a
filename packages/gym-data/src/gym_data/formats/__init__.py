"""Shapes of rows, one module each. Third parties add theirs under the entry point `gym.formats`."""

from gym_data.formats._base import Format, Row, RowError
from gym_data.formats._registry import detect, format_named, formats, raise_near_miss

__all__ = ["Format", "Row", "RowError", "detect", "format_named", "formats", "raise_near_miss"]
