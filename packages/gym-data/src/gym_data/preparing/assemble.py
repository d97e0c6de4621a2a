"""From encoded batches to the training and evaluation store: held out first, repeated after."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_data.preparing.batch import EncodedBatch
from gym_data.store.read import TokenStore
from gym_data.store.write import StoreWriter
from gym_sdk.errors import DataError


class SourceStore:
    """Everything that one source gave, with a hash for each group."""

    def __init__(self, folder: Path, batches: Iterable[EncodedBatch]) -> None:
        """Writes the batches into `folder`."""
        self.folder = folder
        self._hashes_path = folder.with_name(f"{folder.name}.hashes")
        with StoreWriter(folder) as writer, self._hashes_path.open("wb") as hashes:
            for batch in batches:
                writer.add_many(
                    batch.tokens, batch.loss_mask, batch.lengths, batch.rows, batch.roles, batch.group_sizes
                )
                hashes.write(batch.hashes.tobytes())
        self.num_groups: int = self.store.num_groups

    @property
    def hashes(self) -> NDArray[Any]:
        """[G] content of each group, as 16 opaque bytes; read from disk, since few preparations need them."""
        return np.fromfile(self._hashes_path, "V16")

    @property
    def store(self) -> TokenStore:
        """What was written."""
        return TokenStore(self.folder)

    def remove(self) -> None:
        """Removes what is left of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._hashes_path.unlink()


def held_out(hashes: NDArray[Any], share: float | None) -> NDArray[np.bool_]:
    """[G] which groups are held out: whole sets of equal groups, in the order of their hash, up to the share.

    The hashes are salted with the seed, so their order is a random one that depends on content and seed only.
    """
    if not share:
        return np.zeros(len(hashes), bool)
    ordered, inverse, counts = np.unique(_sortable(hashes), return_inverse=True, return_counts=True)
    if len(ordered) < 2:
        raise DataError("there is nothing to hold out: all rows are equal", hint="Drop data.eval.split or add rows.")
    wanted = max(1, round(share * len(hashes)))
    before = np.cumsum(counts) - counts
    taken = min(int(np.count_nonzero(before < wanted)), len(ordered) - 1)
    return inverse.ravel() < taken


def is_in(hashes: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """[G] whether each group has an equal one among `others`."""
    return np.isin(_sortable(hashes), _sortable(others))


def write_training(target: Path, sources: list[tuple[SourceStore, NDArray[np.bool_], float]], seed: int) -> None:
    """The training store: of each source the groups that are kept, as often as its weight says."""
    if len(sources) == 1 and sources[0][1].all() and sources[0][2] == 1.0:
        shutil.move(sources[0][0].folder, target)
        return
    with StoreWriter(target) as writer:
        for index, (source, kept, weight) in enumerate(sources):
            store = source.store
            groups = np.flatnonzero(kept)
            for _ in range(int(weight)):
                writer.add_groups(store, groups)
            extra = round((weight - int(weight)) * len(groups))
            if extra:
                drawn = np.random.default_rng((seed, index)).choice(groups, extra, replace=False)
                writer.add_groups(store, np.sort(drawn))


def _sortable(hashes: NDArray[Any]) -> NDArray[Any]:
    """Opaque bytes as pairs of integers, which can be sorted."""
    return np.ascontiguousarray(hashes).view(np.dtype([("high", ">u8"), ("low", ">u8")])).ravel()
