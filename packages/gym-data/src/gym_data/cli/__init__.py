"""The commands of `gym data`."""
