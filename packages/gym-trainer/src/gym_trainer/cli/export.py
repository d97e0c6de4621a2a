"""`gym export`: a run's adapter and its base as one model that plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from gym_sdk.cli import console


def export(
    run: Annotated[Path, Parameter(help="A run's folder.")],
    *,
    merge: Annotated[Path, Parameter(help="The folder to write the merged model to; new or empty.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], Parameter(help="The precision that weights are stored in.")
    ] = "float32",
    json: Annotated[bool, Parameter(negative="", help="For scripts.")] = False,
) -> int:
    """Merge a run's adapter into its base. The result is shown to say what the adapter said, or refused."""
    from gym_trainer.exporting.export import export_merged

    done = export_merged(run, merge, dtype=dtype)
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
