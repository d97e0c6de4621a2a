"""Prepared rows on disk."""

from gym_data.store.read import Document, DocumentRole, TokenStore
from gym_data.store.write import StoreWriter

__all__ = ["Document", "DocumentRole", "StoreWriter", "TokenStore"]
