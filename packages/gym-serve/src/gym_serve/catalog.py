"""The models of this daemon: bases, adapters and experience libraries, by id and alias.

A model is an immutable version: its files are copied into the store under the digest of their content and never
changed. A name (an alias, or the id of a run that is served again) may come to mean another version; a request keeps
the one that its name meant when it came.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import shutil
import sqlite3
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from gym_serve._database import Database
from gym_serve.auth import Key
from gym_serve.errors import Reason, ServiceError, invalid, not_found
from gym_serve.model_store import Kept, ModelStore

EVERYONE = ""
"""The owner of what all keys may use."""
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")


class ModelKind(StrEnum):
    """What a model is made of."""

    BASE = "base"
    ADAPTER = "adapter"
    EXPERIENCES = "experiences"


@dataclass(frozen=True, kw_only=True)
class Model:
    """One version of one model."""

    id: str
    owner: str
    kind: ModelKind
    base_id: str | None
    """What it stands on: the base of an adapter; the base or adapter that a library stands in front of."""
    source: str
    """Of a base: as the operator named it. Otherwise the folder in the store."""
    revision: str | None = None
    content_id: str | None = None
    """The digest of what it is; None for a base that has not been loaded yet."""
    size_bytes: int = 0
    created_at: float
    job_id: str | None = None
    lineage: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where an adapter's or library's files are."""
        assert self.kind is not ModelKind.BASE
        return Path(self.source)


class Catalog:
    """Reads are from memory, for every request asks; writes go to the database first."""

    def __init__(self, database: Database, store: ModelStore) -> None:
        self._database = database
        self._store = store
        self._models: dict[str, Model] = {}
        self._aliases: dict[str, str] = {}

    async def load(self) -> None:
        """Reads the database. Called once, before anything else."""

        def read(connection: sqlite3.Connection) -> tuple[list[Model], dict[str, str]]:
            models = [_model_of(row) for row in connection.execute("SELECT * FROM models")]
            aliases = {row["name"]: row["model_id"] for row in connection.execute("SELECT * FROM model_aliases")}
            return models, aliases

        models, self._aliases = await self._database.read(read)
        self._models = {model.id: model for model in models}
        used = {Path(model.source) for model in models}
        self._store.keep_only(used)

    # What jobs ask (see `gym_serve.jobs.admission.ModelLookup`).

    def base_source(self, model_id: str) -> str | None:
        """The source of a base model, or of the base of an adapter; a base may also be named by its source."""
        model = self._named(model_id)
        base = self._models.get(self.base_id_of(model)) if model is not None else None
        return base.source if base is not None else None

    def adapter_folder(self, model_id: str) -> str | None:
        """The folder of an adapter."""
        model = self._models.get(self._aliases.get(model_id, model_id))
        return model.source if model is not None and model.kind is ModelKind.ADAPTER else None

    def experiences_folder(self, model_id: str) -> str | None:
        """The folder of an experience library."""
        model = self._models.get(self._aliases.get(model_id, model_id))
        return model.source if model is not None and model.kind is ModelKind.EXPERIENCES else None

    # What everyone asks.

    def get(self, key: Key, name: str) -> Model:
        """A model by id or alias, if this key may use it."""
        model = self._models.get(self._aliases.get(name, name))
        if model is None or not _may_use(key, model):
            near = difflib.get_close_matches(name, [each.id for each in self.all(key)], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "GET /v1/models and gym models list show what there is"
            raise not_found(Reason.MODEL_NOT_FOUND, name, field="model", hint=hint)
        return self._shown(model)

    def has(self, model_id: str) -> bool:
        """Whether there is a model of this id."""
        return model_id in self._models

    def find(self, owner: str, name: str) -> Model | None:
        """A model by id, alias or, of a base, source, if it is this owner's or everyone's."""
        model = self._named(name)
        return model if model is not None and model.owner in (owner, EVERYONE) else None

    def stands_on(self, model: Model) -> Model:
        """What an adapter or a library stands on."""
        assert model.base_id is not None
        return self._models[model.base_id]

    def base_of(self, model: Model) -> Model:
        """The base that a model runs on; a base's is itself."""
        return self._models[self.base_id_of(model)]

    def base_id_of(self, model: Model) -> str:
        """The id of the base that a model runs on, also for one that was removed a moment ago."""
        while model.base_id is not None:
            below = self._models.get(model.base_id)
            if below is None:
                return model.base_id
            model = below
        return model.id

    def all(self, key: Key, *, kind: ModelKind | None = None, base_id: str | None = None) -> list[Model]:
        """What a key may use: bases first, then the newest first."""
        found = [
            self._shown(model)
            for model in self._models.values()
            if _may_use(key, model)
            and (kind is None or model.kind is kind)
            and (base_id is None or model.base_id == base_id)
        ]
        return sorted(found, key=lambda model: (model.kind is not ModelKind.BASE, -model.created_at, model.id))

    def bases(self) -> list[Model]:
        """Every base."""
        return [model for model in self._models.values() if model.kind is ModelKind.BASE]

    async def add_base(self, source: str, *, revision: str | None = None, model_id: str | None = None) -> Model:
        """A base by its source; the one that is there already when it is the same."""
        for model in self.bases():
            if (model.source, model.revision) == (source, revision):
                return model
        base = Model(
            id=self.free_id(model_id or base_name(source)),
            owner=EVERYONE,
            kind=ModelKind.BASE,
            base_id=None,
            source=source,
            revision=revision,
            created_at=time.time(),
        )
        return await self._insert(base)

    async def add_adapter(
        self,
        folder: Path,
        base: Model,
        *,
        model_id: str,
        owner: str,
        job_id: str | None = None,
        lineage: dict[str, str] | None = None,
    ) -> Model:
        """Copies an adapter into the store. A model of the same id and content is given back as it is; one of other
        content is replaced, and requests that run keep the old version.

        Raises `ModelError` for what is no adapter: a pickle, nothing in it, a damaged file.
        """
        kept = await asyncio.to_thread(self._store.copy_adapter, folder)
        return await self._add_version(ModelKind.ADAPTER, kept, base, model_id, owner, job_id, lineage)

    async def add_experiences(
        self,
        folder: Path,
        carrier: Model,
        *,
        model_id: str,
        owner: str,
        job_id: str | None = None,
        lineage: dict[str, str] | None = None,
    ) -> Model:
        """Copies an experience library into the store, to stand in front of a base or an adapter. As `add_adapter`
        otherwise. Raises `DataError` for what is no library."""
        if carrier.kind is ModelKind.EXPERIENCES:
            raise invalid(f"'{carrier.id}' is a library already; one stands in front of a model", field="base_model_id")
        kept = await asyncio.to_thread(self._store.copy_experiences, folder)
        return await self._add_version(ModelKind.EXPERIENCES, kept, carrier, model_id, owner, job_id, lineage)

    async def _add_version(
        self,
        kind: ModelKind,
        kept: Kept,
        below: Model,
        model_id: str,
        owner: str,
        job_id: str | None,
        lineage: dict[str, str] | None,
    ) -> Model:
        known = self._models.get(model_id)
        if known is not None and (known.content_id, known.base_id, known.owner) == (kept.content_id, below.id, owner):
            return known
        version = Model(
            id=model_id,
            owner=owner,
            kind=kind,
            base_id=below.id,
            source=str(kept.folder),
            content_id=kept.content_id,
            size_bytes=kept.size_bytes,
            created_at=time.time(),
            job_id=job_id,
            lineage=lineage or {},
        )
        return await self._insert(version)

    async def add_tuned_base(
        self, folder: Path, *, model_id: str, owner: str, job_id: str, lineage: dict[str, str]
    ) -> Model:
        """A whole model that a job has made. Its files are linked into the store where they can be, not copied."""
        target, size_bytes = await asyncio.to_thread(self._store.link_model, folder, job_id)
        known = self._models.get(model_id)
        if known is not None and known.source == str(target):
            return known
        model = Model(
            id=model_id,
            owner=owner,
            kind=ModelKind.BASE,
            base_id=None,
            source=str(target),
            size_bytes=size_bytes,
            created_at=time.time(),
            job_id=job_id,
            lineage=lineage,
        )
        return await self._insert(model)

    async def discard(self, model: Model) -> None:
        """Takes back a model that turned out not to be one."""
        await self._database.write(
            lambda connection: connection.execute("DELETE FROM models WHERE id = ?", (model.id,))
        )
        self._models.pop(model.id, None)

    async def remove(self, key: Key, name: str) -> Model:
        """Removes a model with its aliases. A base with adapters stays."""
        model = self.get(key, name)
        if model.owner != key.id and not key.is_admin:
            raise ServiceError(Reason.ADMIN_REQUIRED, f"removing '{model.id}', which all use, needs an admin's key")
        children = [each.id for each in self._models.values() if each.base_id == model.id]
        if children:
            raise ServiceError(
                Reason.IN_USE, f"'{model.id}' is the base of {', '.join(children[:3])}", hint="remove those first"
            )
        await self._database.write(
            lambda connection: connection.execute("DELETE FROM models WHERE id = ?", (model.id,))
        )
        del self._models[model.id]
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != model.id}
        if model.kind is not ModelKind.BASE and not any(each.source == model.source for each in self._models.values()):
            shutil.rmtree(model.source, ignore_errors=True)
        return model

    async def set_alias(self, key: Key, alias: str, name: str) -> Model:
        """Lets an alias mean a model. One that is there moves, if it is this key's."""
        model = self.get(key, name)
        if not _ALIAS.fullmatch(alias):
            raise invalid("an alias has letters, digits and . _ : / - in it", field="alias")
        if alias in self._models:
            raise ServiceError(Reason.ALIAS_TAKEN, f"'{alias}' is the id of a model", field="alias")

        def transaction(connection: sqlite3.Connection) -> None:
            row = connection.execute("SELECT owner FROM model_aliases WHERE name = ?", (alias,)).fetchone()
            if row is not None and row["owner"] != key.id and not key.is_admin:
                raise ServiceError(Reason.ALIAS_TAKEN, f"the alias '{alias}' is another key's", field="alias")
            connection.execute(
                """INSERT INTO model_aliases (name, owner, model_id, created_at) VALUES (?, ?, ?, ?)
                   ON CONFLICT (name) DO UPDATE SET model_id = excluded.model_id""",
                (alias, key.id, model.id, time.time()),
            )

        await self._database.write(transaction)
        self._aliases[alias] = model.id
        return self._shown(model)

    async def remove_alias(self, key: Key, alias: str) -> None:
        """Forgets an alias."""

        def transaction(connection: sqlite3.Connection) -> None:
            row = connection.execute("SELECT owner FROM model_aliases WHERE name = ?", (alias,)).fetchone()
            if row is None or not key.may_see(row["owner"]):
                raise not_found(Reason.MODEL_NOT_FOUND, alias, field="alias")
            connection.execute("DELETE FROM model_aliases WHERE name = ?", (alias,))

        await self._database.write(transaction)
        self._aliases.pop(alias, None)

    async def _insert(self, model: Model) -> Model:
        await self._database.write(
            lambda connection: connection.execute(
                """INSERT INTO models (id, owner, kind, base_id, source, revision, content_id, size_bytes, created_at,
                       job_id, lineage_json)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
                   ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, kind = excluded.kind,
                       base_id = excluded.base_id,
                       source = excluded.source, content_id = excluded.content_id, size_bytes = excluded.size_bytes,
                       created_at = excluded.created_at, job_id = excluded.job_id,
                       lineage_json = excluded.lineage_json""",
                (
                    model.id,
                    model.owner,
                    model.kind.value,
                    model.base_id,
                    model.source,
                    model.revision,
                    model.content_id,
                    model.size_bytes,
                    model.created_at,
                    model.job_id,
                    json.dumps(model.lineage),
                ),
            )
        )
        self._models[model.id] = model
        return model

    def _named(self, name: str) -> Model | None:
        """A model by id or alias, or a base by its source."""
        model = self._models.get(self._aliases.get(name, name))
        return model or next((base for base in self.bases() if base.source == name), None)

    def _shown(self, model: Model) -> Model:
        aliases = tuple(sorted(alias for alias, target in self._aliases.items() if target == model.id))
        return replace(model, aliases=aliases) if aliases else model

    def free_id(self, wanted: str) -> str:
        """An id that no model has, made of the wanted one."""
        if wanted not in self._models:
            return wanted
        return next(f"{wanted}-{n}" for n in range(2, 10_000) if f"{wanted}-{n}" not in self._models)


def base_name(source: str) -> str:
    """The id of a base: a hub id as it is, a file or folder by its name."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source) and not Path(source).exists():
        return source
    name = re.split(r"[/:\\]", source.rstrip("/"))[-1].removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def tuned_name(base: Model, suffix: str, unique: str) -> str:
    """The id of what a job makes, in the form that users of OpenAI's API know: `ft:<base>:gym:<suffix>:<unique>`."""
    short = base.id.rpartition("/")[2]
    return f"ft:{short}:gym:{re.sub(r'[^A-Za-z0-9._-]+', '-', suffix)}:{unique}"


def _may_use(key: Key, model: Model) -> bool:
    return model.owner == EVERYONE or key.may_see(model.owner)


def _model_of(row: sqlite3.Row) -> Model:
    return Model(
        id=row["id"],
        owner=row["owner"],
        kind=ModelKind(row["kind"]),
        base_id=row["base_id"],
        source=row["source"],
        revision=row["revision"],
        content_id=row["content_id"],
        size_bytes=row["size_bytes"],
        created_at=row["created_at"],
        job_id=row["job_id"],
        lineage=json.loads(row["lineage_json"]),
    )
