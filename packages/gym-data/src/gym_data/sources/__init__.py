"""Where rows are read from: files of every common kind, folders, the hub, URLs."""

from gym_data.sources.inputs import check_exists
from gym_data.sources.records import read_records

__all__ = ["check_exists", "read_records"]
