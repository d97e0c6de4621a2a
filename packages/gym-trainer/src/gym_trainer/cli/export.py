"""`gym export`: a run's result in another form or place: a merged model folder, a GGUF file, a hub's repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from gym_sdk.cli import console
from gym_sdk.errors import UserError


def export(
    run: Annotated[Path, Parameter(help="A run's folder.")],
    *,
    merge: Annotated[Path | None, Parameter(help="The folder to write the merged model to; new or empty.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], Parameter(help="The precision of the merged folder's weights.")
    ] = "float32",
    gguf: Annotated[Path | None, Parameter(help="The GGUF file to write, for llama.cpp, Ollama and LM Studio.")] = None,
    quant: Annotated[
        Literal["f32", "f16", "q8_0"], Parameter(help="How the GGUF file's matrices are stored.")
    ] = "q8_0",
    adapter: Annotated[
        str, Parameter(help="Which of the run's adapters: the trained one, or one of adapter.beside by its name.")
    ] = "default",
    push: Annotated[str | None, Parameter(help="The hub's repository to send the result to, OWNER/NAME.")] = None,
    public: Annotated[bool, Parameter(negative="", help="Make a new repository that everyone can read.")] = False,
    json: Annotated[bool, Parameter(negative="", help="For scripts.")] = False,
) -> int:
    """Write a run's result in another form. It is shown to say what the run's own says, or refused."""
    if sum(target is not None for target in (merge, gguf, push)) != 1:
        raise UserError(
            "name one thing to make of the run",
            hint="gym export RUN with --merge FOLDER, --gguf FILE or --push OWNER/NAME",
        )
    if push is not None and adapter != "default":
        raise UserError(
            "only the trained adapter is pushed, with its card", hint="push the other from the run that trained it"
        )
    from gym_trainer.run import require_torch

    require_torch("exporting")
    if push is not None:
        return _pushed(run, push, public, json)
    if merge is not None:
        return _merged(run, merge, dtype, adapter, json)
    assert gguf is not None
    return _gguf(run, gguf, quant, adapter, json)


def _pushed(run: Path, repository: str, public: bool, json: bool) -> int:
    from gym_trainer.exporting.hub import push

    done = push(run, repository, public=public)
    if json:
        console.out_json({"url": done.url, "folder": str(done.folder), "size_bytes": done.size_bytes})
    else:
        console.out(done.url)
    return 0


def _merged(run: Path, merge: Path, dtype: Literal["float32", "bfloat16"], adapter: str, json: bool) -> int:
    from gym_trainer.exporting.export import export_merged

    done = export_merged(run, merge, dtype=dtype, adapter=adapter)
    if json:
        console.out_json(
            {
                "path": str(merge),
                "dtype": dtype,
                "size_bytes": done.size_bytes,
                "adapter_to_merged": done.check.adapter_to_merged,
                "base_to_adapter": done.check.base_to_adapter,
            }
        )
        return 0
    console.err(
        f"logits: {done.check.adapter_to_merged:.1e} from the adapter's, where the adapter moved them by "
        f"{done.check.base_to_adapter:.1e} (relative)"
    )
    console.err(f"wrote {console.format_size(done.size_bytes)}, {dtype}")
    console.out(str(merge))
    return 0


def _gguf(run: Path, gguf: Path, quant: Literal["f32", "f16", "q8_0"], adapter: str, json: bool) -> int:
    from gym_trainer.exporting.export import export_gguf

    done = export_gguf(run, gguf, quant=quant, adapter=adapter)
    if json:
        console.out_json(
            {
                "path": str(gguf),
                "quant": quant,
                "size_bytes": done.file.size_bytes,
                "num_tensors": done.file.num_tensors,
                "largest_error": done.file.largest_error,
                "modelfile": str(done.modelfile),
                "modelfile_has_template": done.has_template,
            }
        )
        return 0
    console.err(
        f"{done.file.num_tensors} tensors, read back: at most {done.file.largest_error:.1e} of a tensor's largest "
        "weight off"
    )
    if not done.has_template:
        console.warn("the chat template cannot be written in Ollama's language: Ollama will guess one")
    console.err(f"wrote {console.format_size(done.file.size_bytes)}, {quant}")
    console.err(f"in Ollama: ollama create {run.name} -f {done.modelfile}")
    console.out(str(gguf))
    return 0
