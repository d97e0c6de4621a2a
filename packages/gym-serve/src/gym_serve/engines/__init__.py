"""Engines: prompts as token ids in, streams of token ids out.

`base` and `remote` need no torch; `transformers` does.
"""
