"""The source of both clients. `tools/generate_sync.py` writes `_sync` from it."""
