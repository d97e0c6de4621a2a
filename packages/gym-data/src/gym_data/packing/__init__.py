"""Which rows an optimizer step has, and how it is cut into micro-batches of whole rows."""

from gym_data.packing.bestfit import micro_batches
from gym_data.packing.step import steps

__all__ = ["micro_batches", "steps"]
