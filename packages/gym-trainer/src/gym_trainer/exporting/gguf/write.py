"""A model folder as one GGUF file, a tensor at a time, read back and compared before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gym_sdk.errors import OutputInUse, RunFailed, Where
from gym_trainer.exporting.folder import Base
from gym_trainer.exporting.gguf.families import Family, converted, family_of, metadata_of, rotary_factors
from gym_trainer.exporting.gguf.vocabulary import vocabulary_metadata

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

Quant = Literal["f32", "f16", "q8_0"]

_FILE_TYPES: dict[Quant, int] = {"f32": 0, "f16": 1, "q8_0": 7}  # gguf.LlamaFileType
_LARGEST_ERROR: dict[Quant, float] = {"f32": 0.0, "f16": 2.0**-10, "q8_0": 2.0**-6}
"""Of a stored weight, relative to the largest in its tensor: half a step, and the rounding of a block's scale."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """What was written."""

    path: Path
    size_bytes: int
    num_tensors: int
    largest_error: float
    """Of any weight, relative to the largest in its tensor."""


def write_gguf(model_folder: Path, out: Path, base: Base, *, quant: Quant, name: str) -> GgufFile:
    """Write the weights of `model_folder` with the tokenizer and template of training.

    Matrices are stored as `quant` says; norms, biases and rotary factors stay float32, as readers expect.

    Raises:
        ModelError: an architecture or a tokenizer that is not exported.
        OutputInUse: `out` exists.
        RunFailed: what was read back is not what was written.
    """
    from gguf import GGUFWriter

    from gym_serve.models import read_config

    require_free(out)
    config = read_config(model_folder)
    family = family_of(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        with _weights(model_folder) as weights:
            writer = GGUFWriter(staged, family.architecture)
            _add_metadata(writer, config, family, base, weights, quant=quant, name=name)
            plan = _plan(config, family, weights, quant)
            for tensor in plan:
                writer.add_tensor_info(
                    tensor.name, tensor.stored_shape, tensor.dtype, tensor.size_bytes, raw_dtype=tensor.kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in plan:
                writer.write_tensor_data(tensor.stored(weights, config, family))
            writer.close()
            largest = _compare(staged, plan, weights, config, family, quant)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.rename(out)
    finally:
        staged.unlink(missing_ok=True)
    return GgufFile(path=out, size_bytes=out.stat().st_size, num_tensors=len(plan), largest_error=largest)


def require_free(out: Path) -> None:
    """Raise OutputInUse where something is already there."""
    if out.exists():
        raise OutputInUse("is in use", where=Where(file=str(out)), hint="name a file that is not there yet")


class _Weights:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, files: list[Any]) -> None:
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def float32(self, name: str) -> np.ndarray:
        return self._file_of[name].get_tensor(name).float().numpy()


@contextmanager
def _weights(folder: Path) -> Iterator[_Weights]:
    from safetensors import safe_open

    with ExitStack() as stack:
        paths = sorted(folder.glob("*.safetensors"))
        yield _Weights([stack.enter_context(safe_open(str(path), framework="pt")) for path in paths])


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor of the file."""

    name: str
    source: str | None
    """The weight's name in the folder; None for rotary factors, whose values are here."""
    values: np.ndarray | None
    shape: tuple[int, ...]
    kind: GGMLQuantizationType

    @property
    def size_bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * block_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype({"F32": np.float32, "F16": np.float16}.get(self.kind.name, np.uint8))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the array that is written: bytes for a quantised kind."""
        from gguf import GGML_QUANT_SIZES

        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        if self.dtype != np.uint8:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // block * block_bytes)

    def exact(self, weights: _Weights, config: Any, family: Family) -> np.ndarray:
        """float32, in the file's order."""
        if self.source is None:
            assert self.values is not None
            return self.values
        return converted(self.source, weights.float32(self.source), config, family)

    def stored(self, weights: _Weights, config: Any, family: Family) -> np.ndarray:
        from gguf.quants import quantize

        return quantize(np.ascontiguousarray(self.exact(weights, config, family)), self.kind)


def _plan(config: Any, family: Family, weights: _Weights, quant: Quant) -> list[_Tensor]:
    from gguf import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

    architecture: Any = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    assert isinstance(architecture, MODEL_ARCH)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    full = GGMLQuantizationType.F32
    plan = [
        _Tensor(name=name, source=None, values=values, shape=values.shape, kind=full)
        for name, values in rotary_factors(config).items()
    ]
    for source in weights.names():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise RunFailed(f"the weight {source} has no name in a GGUF file of architecture {family.architecture}")
        shape = weights.shape(source)
        kind = full
        if len(shape) > 1:
            kind = GGMLQuantizationType[quant.upper()]
            if shape[-1] % GGML_QUANT_SIZES[kind][0]:
                kind = GGMLQuantizationType.F16  # rows that are not whole blocks, as llama.cpp's own converter does
        plan.append(_Tensor(name=name, source=source, values=None, shape=shape, kind=kind))
    return plan


def _add_metadata(
    writer: GGUFWriter, config: Any, family: Family, base: Base, weights: _Weights, *, quant: Quant, name: str
) -> None:
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[quant])
    writer.add_quantization_version(2)
    for key, value in metadata_of(config, family).items():
        _add(writer, f"{family.architecture}.{key}", value)
    rows = weights.shape("model.embed_tokens.weight")[0]
    for key, value in vocabulary_metadata(base.tokenizer, list(base.renderer.stop_ids), rows).items():
        _add(writer, key, value)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _compare(path: Path, plan: list[_Tensor], weights: _Weights, config: Any, family: Family, quant: Quant) -> float:
    """The largest error of a weight read back, relative to the largest of its tensor.

    Raises:
        RunFailed: it is more than the format rounds.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    read = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    if set(read) != {tensor.name for tensor in plan}:
        raise RunFailed("the GGUF file that was written lacks tensors")
    largest = 0.0
    for tensor in plan:
        exact = tensor.exact(weights, config, family)
        back = dequantize(read[tensor.name].data, tensor.kind).reshape(exact.shape)
        error = float(np.max(np.abs(back - exact)) / (np.max(np.abs(exact)) or 1.0))
        if not error <= max(_LARGEST_ERROR[quant], _LARGEST_ERROR["f16"] if tensor.kind.name == "F16" else 0.0):
            raise RunFailed(f"{tensor.name} read back from the GGUF file is {error:.1e} from what was written")
        largest = max(largest, error)
    return largest
