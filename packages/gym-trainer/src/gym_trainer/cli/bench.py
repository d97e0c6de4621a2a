"""`gym bench train` and `gym bench data`: steps and preparation measured on this machine."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from gym_sdk.cli import console
from gym_sdk.errors import UserError

app: App = App(name="bench", help="Measure this machine.")
app.command("gym_data.cli.bench:bench", name="data", help="Measure how fast chats become packed tokens.")


@app.command
def train(
    model: Annotated[str, Parameter(help="hub id, folder or .gguf: only its configuration is used")],
    *,
    rank: Annotated[int, Parameter(help="of LoRA on every linear layer; 0 trains every weight")] = 16,
    lengths: Annotated[
        str, Parameter(help="tokens of each document of a step, such as 2048x4 or 100,250,60")
    ] = "2048x4",
    steps: Annotated[int, Parameter(help="measured optimizer steps a row")] = 5,
    compile: Annotated[bool, Parameter(help="measure compiled layers too")] = True,
    json: Annotated[bool, Parameter(help="for scripts")] = False,
) -> int:
    """Measure training steps: the usual way, then Gym's parts switched on one after another. Weights are random."""
    from gym_sdk.spec.model import ModelSpec
    from gym_trainer.bench.train import BenchSettings, bench_train, render
    from gym_trainer.planning.source import load_config

    settings = BenchSettings(rank=rank, lengths=parse_lengths(lengths), num_steps=steps, compile=compile)
    config, _ = load_config(ModelSpec(source=model))
    report = bench_train(
        config, settings, on_row=lambda row: console.err(f"{row.name}: {row.throughput_tokens_per_s:,.0f} tokens/s")
    )
    if json:
        console.out_json(report.as_dict())
    else:
        console.out(render(report))
    return 0


def parse_lengths(text: str) -> tuple[int, ...]:
    """`2048x4` or `100,250,60`.

    Raises:
        UserError: something else.
    """
    try:
        if "x" in text:
            length, count = text.split("x")
            lengths = (int(length),) * int(count)
        else:
            lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 2:
        raise UserError(f"--lengths {text} is not a list of lengths", hint="write it as 2048x4 or 100,250,60")
    return lengths
