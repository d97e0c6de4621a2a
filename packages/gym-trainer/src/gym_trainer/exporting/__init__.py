"""Artifacts in Hugging Face layout, each one complete or absent."""
