"""`gym serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gym_serve import keeper, logs
from gym_serve.listening import are_inherited
from gym_serve.settings import load_settings, render_settings


def serve(
    model: Annotated[str | None, Parameter(help="A run, a model or adapter folder, a hub id, or a .gguf file.")] = None,
    *,
    host: Annotated[str | None, Parameter(help="The address to listen on; 127.0.0.1 unless given.")] = None,
    port: Annotated[int | None, Parameter(help="The HTTP port, 8000 unless given; 0 finds a free one.")] = None,
    grpc_port: Annotated[int | None, Parameter(help="The gRPC port, 50051 unless given; 0 finds a free one.")] = None,
    data_dir: Annotated[Path | None, Parameter(help="Where jobs, files, models and keys live.")] = None,
    settings: Annotated[Path | None, Parameter(help="A TOML file with all settings; options go before it.")] = None,
    device: Annotated[str | None, Parameter(help="Where to generate: auto, cpu or cuda.")] = None,
    dtype: Annotated[
        str | None, Parameter(help="Precision of the weights: auto, float32, bfloat16 or float16.")
    ] = None,
    keep_running: Annotated[
        bool, Parameter(help="Start the daemon again whenever it dies; connections wait meanwhile.")
    ] = False,
    print_settings: Annotated[bool, Parameter(help="Write every setting with its documentation, and end.")] = False,
) -> int:
    """Serve a model and its adapters, and run fine-tuning jobs, over HTTP (OpenAI's API) and gRPC.

    A key for this machine's user is made on the first start; the other commands find it. Keys for others come from
    GYM_API_KEY and GYM_ADMIN_KEY, or from gym keys create.
    """
    overrides: dict[str, dict[str, Any]] = {
        "server": {"host": host, "port": port, "grpc_port": grpc_port, "data_dir": str(data_dir) if data_dir else None},
        "engine": {"model": model, "device": device, "dtype": dtype},
    }
    given = {
        section: {name: value for name, value in fields.items() if value is not None}
        for section, fields in overrides.items()
    }
    loaded = load_settings(settings, given)
    if print_settings:
        sys.stdout.write(render_settings(loaded))
        return 0
    logs.configure(loaded.log)
    if keep_running and not are_inherited(os.environ):
        return keeper.keep_running(loaded.server.host, loaded.server.port)
    # gRPC's own lines on stderr say in other words what the daemon reports.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # After the settings were found right: it loads both servers.
    from gym_serve.daemon import run

    asyncio.run(run(loaded))
    return 0
