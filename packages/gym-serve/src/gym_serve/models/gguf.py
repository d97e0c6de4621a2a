"""GGUF files, converted once into folders in Hugging Face layout.

The result is kept in the cache under the file's SHA-256 and the converter's version; it loads in about two seconds.
transformers can read GGUF files itself, but takes 20 s to a minute for 135M parameters each time, skips tensors that it
has no name for (Llama 3's `rope_freqs`) and drops the pre-tokenizer's name (digits are then split differently). Here
every tensor must find its place and every weight must be filled, or the file is refused.

Weights are written in float32 up to a billion parameters, which is exact (a 4-bit code times a half-precision scale
needs 15 bits of mantissa, bfloat16 has 8) and is what a processor computes in. Above that they are written in bfloat16:
half the disk, and an error (2^-9 of a weight) far below that of the 4-bit code (2^-5 of a block's range).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_sdk.errors import MissingExtra, ModelError
from gym_sdk.folders import cache_dir
from gym_serve.models.cache import file_sha256, make_once
from gym_serve.models.gguf_config import ARCHITECTURES, hugging_face_config, weight_name
from gym_serve.models.gguf_tokenizer import build_tokenizer
from gym_serve.models.progress import ProgressCallback, human_size

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

CONVERTER_VERSION = 1
"""Part of the cache key: raised when the same file would convert to something else."""

EXACT_MAX_PARAMETERS = 1_000_000_000
"""Up to this size weights are written in float32."""

SHARD_SIZE_BYTES = 4_000_000_000


def convert_once(path: Path, report: ProgressCallback) -> tuple[Path, str]:
    """The converted folder of a GGUF file, and its content id. Two processes that ask at once make one conversion.

    Raises:
        ModelError: the file is damaged, or of an architecture or tokenizer that cannot be converted exactly.
    """
    digest = file_sha256(path)
    place = cache_dir() / "models" / f"gguf-{digest[:32]}-v{CONVERTER_VERSION}"
    return make_once(place, lambda folder: convert(path, folder, report)), f"gguf:{digest}"


def convert(path: Path, folder: Path, report: ProgressCallback) -> None:
    """Write the model of a GGUF file into an empty `folder`. Needs no torch."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtra("converting a GGUF file", package="gym-serve", extra="torch") from error

    stage = f"converting {path.name} ({human_size(path.stat().st_size)}), once"
    report(stage, 0, None, "tensors")
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, OverflowError) as error:
        raise ModelError(
            f"{path} is not a whole GGUF file: {error}", hint="download it again and compare its size or SHA-256"
        ) from error
    metadata: dict[str, Any] = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of architecture {architecture}, which is not converted here",
            hint=f"known: {', '.join(ARCHITECTURES)}; use the model that the file was made from "
            "(a hub id, or a folder in Hugging Face layout)",
        )
    tokenizer = build_tokenizer(metadata, path)
    factors = next((_dequantize(t) for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    names = {tensor.name for tensor in reader.tensors}
    exact = sum(int(tensor.n_elements) for tensor in reader.tensors) <= EXACT_MAX_PARAMETERS
    config = hugging_face_config(metadata, names, factors, path)
    config |= {"dtype": "float32" if exact else "bfloat16", "bos_token_id": tokenizer.bos_id}
    config |= {"eos_token_id": tokenizer.stop_ids, "pad_token_id": tokenizer.pad_id}
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_weights(reader, config, folder, exact=exact, stage=stage, report=report)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)


def _write_weights(
    reader: GGUFReader, config: Mapping[str, Any], folder: Path, *, exact: bool, stage: str, report: ProgressCallback
) -> None:
    tensors = [tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"]
    total = len(tensors)
    done = 0
    report(stage, 0, total, "tensors")
    width = 4 if exact else 2
    shards = _shards(tensors, width)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / file_name).open("wb") as file:
            file.write(_safetensors_header(shard, exact=exact))
            for tensor in shard:
                weight = _dequantize(tensor)
                if config["model_type"] == "llama" and tensor.name.split(".")[2:3] in (["attn_q"], ["attn_k"]):
                    heads = config["num_attention_heads" if "attn_q" in tensor.name else "num_key_value_heads"]
                    weight = unpermute(weight, int(str(heads)))
                file.write(weight.data if exact else to_bfloat16(weight).data)
                weight_map[weight_name(tensor.name)] = file_name
                done += 1
                report(stage, done, total, "tensors")
    if len(shards) > 1:
        size_bytes = sum(int(tensor.n_elements) * width for tensor in tensors)
        index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _safetensors_header(tensors: Iterable[ReaderTensor], *, exact: bool) -> bytes:
    """The start of a safetensors file: the header's length in 8 bytes, then JSON padded to 8.

    Written here so that one weight at a time is in memory; the library's writers take all of a file's at once.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + int(tensor.n_elements) * (4 if exact else 2)
        header[weight_name(tensor.name)] = {
            "dtype": "F32" if exact else "BF16",
            "shape": [int(n) for n in reversed(tensor.shape)],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shards(tensors: Iterable[ReaderTensor], width: int) -> list[list[ReaderTensor]]:
    shards: list[list[ReaderTensor]] = [[]]
    room = SHARD_SIZE_BYTES
    for tensor in tensors:
        size = int(tensor.n_elements) * width
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_SIZE_BYTES
        shards[-1].append(tensor)
        room -= size
    return shards


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    """The tensor in float32, with its rows first (GGUF lists dimensions from the innermost)."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return np.ascontiguousarray(values, dtype=np.float32).reshape([int(n) for n in reversed(tensor.shape)])


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of query and key rows, which pairs the two halves of each head for its rotation.

    Its converter takes a head's rows [2, half] to [half, 2] (`LlamaModel.permute` in convert_hf_to_gguf.py).
    """
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16 (uint16), rounded to nearest even. The values must be finite."""
    assert math.isfinite(float(np.max(np.abs(values), initial=0.0)))
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
