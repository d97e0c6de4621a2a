"""`gym bench train` and `gym bench data`: steps and preparation measured on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

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
        str,
        Parameter(
            help="tokens of each document of a step: 2048x4, 100,250,60, or 60+40,150+100 (prompt, trained answer)"
        ),
    ] = "2048x4",
    steps: Annotated[int, Parameter(help="measured optimizer steps a row")] = 5,
    warm_steps: Annotated[int, Parameter(help="steps before them that are not counted")] = 2,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="where")] = "auto",
    dtypes: Annotated[
        str | None, Parameter(help="float32,bfloat16: what weights are held in, one after another")
    ] = None,
    price: Annotated[str | None, Parameter(help="of the machine, such as 2.5/h, for the cost of 1,000 tokens")] = None,
    trl: Annotated[str | None, Parameter(help="an interpreter that has TRL, to measure its SFTTrainer too")] = None,
    unsloth: Annotated[str | None, Parameter(help="an interpreter that has Unsloth, to measure it too")] = None,
    compile: Annotated[bool, Parameter(help="measure compiled layers too")] = True,
    json: Annotated[bool, Parameter(help="for scripts")] = False,
) -> int:
    """Measure training steps: the usual way, then Gym's parts switched on one after another. Weights are random."""
    from gym_sdk.spec.model import ModelSpec
    from gym_trainer.bench.train import BenchSettings, bench_train, render
    from gym_trainer.cli.plan import parse_price
    from gym_trainer.planning.source import load_config

    tokens, prompts = parse_documents(lengths)
    settings = BenchSettings(
        rank=rank,
        lengths=tokens,
        prompts=prompts,
        num_steps=steps,
        num_warm_steps=warm_steps,
        compile=compile,
        device=device,
        dtypes=parse_dtypes(dtypes),
        price_per_hour=parse_price(price),
        trl=trl,
        unsloth=unsloth,
    )
    config, _ = load_config(ModelSpec(source=model))
    report = bench_train(
        config, settings, on_row=lambda row: console.err(f"{row.name}: {row.throughput_tokens_per_s:,.0f} tokens/s")
    )
    if json:
        console.out_json(report.as_dict())
    else:
        console.out(render(report))
    return 0


def parse_documents(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`2048x4`, `100,250,60` or `60+40,150+100` as tokens and prompt tokens of each document.

    Raises:
        UserError: something else.
    """
    documents: list[tuple[int, int]] = []
    try:
        for part in text.split(","):
            size, _, count = part.partition("x")
            prompt, plus, answer = size.partition("+")
            document = (int(prompt) + int(answer), int(prompt)) if plus else (int(size), 0)
            documents += [document] * int(count or 1)
    except ValueError:
        documents = []
    if not documents or any(length < 2 or length <= prompt for length, prompt in documents):
        raise UserError(
            f"--lengths {text} is not a list of lengths", hint="write it as 2048x4, 100,250,60 or 60+40,30+9"
        )
    return tuple(length for length, _ in documents), tuple(prompt for _, prompt in documents)


def parse_dtypes(text: str | None) -> tuple[str, ...] | None:
    """Names of dtypes between commas.

    Raises:
        UserError: another name.
    """
    if text is None:
        return None
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ("float32", "bfloat16")]:
        raise UserError(f"--dtypes: no {unknown[0]}", hint="float32, bfloat16 or both: float32,bfloat16")
    return names
