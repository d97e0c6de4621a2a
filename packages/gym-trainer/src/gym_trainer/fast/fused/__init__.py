"""Decoder layers with a frozen base, fused: LoRA's small products inside the large ones, the rest in a few kernels."""
