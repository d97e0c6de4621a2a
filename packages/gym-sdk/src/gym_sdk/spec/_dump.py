"""A specification as text: the saved form, the wire form, its digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import yaml

from gym_sdk.spec._document import CORE_SCALARS, FLOAT, TAG
from gym_sdk.spec.run import RunSpec


class _CoreDumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would not read back as text."""


for _name, _pattern, _first in CORE_SCALARS:
    _CoreDumper.add_implicit_resolver(TAG + _name, _pattern, [c if c != "\0" else "" for c in _first])
_CoreDumper.add_implicit_resolver(TAG + "float", FLOAT, list("0123456789"))


def dump_yaml(spec: RunSpec) -> str:
    """The whole specification, defaults included, as YAML that `load_spec` reads back to an equal one."""
    data: dict[str, Any] = spec.model_dump(mode="json")
    return yaml.dump(data, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def canonical_json(spec: RunSpec) -> str:
    """The wire form: sorted keys, no spaces, every default written out. Equal specifications give equal text."""
    data = spec.model_dump(mode="json")
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256(spec: RunSpec) -> str:
    """The digest of the canonical JSON, in lower-case hexadecimal."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()
