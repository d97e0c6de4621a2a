"""The fast path: transforms of a model that change its speed and memory, and not what it computes."""
