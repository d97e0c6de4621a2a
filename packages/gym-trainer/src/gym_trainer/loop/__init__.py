"""The one training loop: rows to steps, steps to micro-batches, and checkpoints that are complete or absent."""
