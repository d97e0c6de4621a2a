"""How fast rows become packed tokens: by stage, over cores, and beside another library."""

from gym_data.bench.stages import DataBench, bench

__all__ = ["DataBench", "bench"]
