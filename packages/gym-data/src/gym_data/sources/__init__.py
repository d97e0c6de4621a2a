"""Where rows are read from."""

from gym_data.sources.records import read_records

__all__ = ["read_records"]
