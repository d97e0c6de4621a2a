"""Where rows are read from: files of every common kind, folders, the hub, URLs."""

from gym_data.sources.records import read_records

__all__ = ["read_records"]
