"""Rows as the model sees them, for people."""
