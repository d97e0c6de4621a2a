"""`gym plan`: what a run needs and how fast it will be, before anything heavy loads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gym_sdk.cli import console
from gym_sdk.errors import SpecError, UserError, Where

if TYPE_CHECKING:
    from gym_sdk.spec import RunSpec
    from gym_trainer.planning import DataShape


def plan(
    spec: Annotated[str, Parameter(help="run.yaml")],
    *overrides: Annotated[str, Parameter(help="changes, such as train.learning_rate=1e-4")],
    device: Annotated[str | None, Parameter(help="a card by name (t4, rtx-4090, a100-40, h200), or cpu")] = None,
    price: Annotated[str | None, Parameter(help="of the device, such as 2.5/h, for the cost")] = None,
    data: Annotated[bool, Parameter(help="read the data for its length, and so for the run's time")] = True,
    json: Annotated[bool, Parameter(help="for scripts")] = False,
) -> int:
    """Say what a run needs and how fast it will be."""
    from gym_sdk.spec import load_spec
    from gym_trainer.run import require_torch

    price_per_hour = parse_price(price)
    run_spec = load_spec(spec, overrides)
    if run_spec.method.kind == "training_free_grpo":
        raise SpecError(
            "a training-free run has no plan: it trains no weights",
            where=Where(file=spec, path="method.kind"),
            hint="its budget is in method.budget",
        )
    require_torch("planning")
    from gym_trainer.planning import by_name, detect, render
    from gym_trainer.planning import plan as make_plan
    from gym_trainer.planning.source import teacher_bytes

    hardware = (
        by_name(device)
        if device is not None
        else detect(run_spec.performance.device, num_threads=run_spec.performance.num_threads)
    )
    config, shape = _model_and_data(run_spec, read_data=data)
    result = make_plan(
        run_spec,
        config,
        hardware,
        data=shape,
        price_per_hour=price_per_hour,
        resident_bytes=teacher_bytes(run_spec),
    )
    if json:
        console.out_json(dataclasses.asdict(result))
    else:
        console.out(render(result))
    return 0


def parse_price(text: str | None) -> float | None:
    """`2.5/h` or `2.5` as a number an hour.

    Raises:
        UserError: something else.
    """
    if text is None:
        return None
    try:
        price = float(text.removesuffix("/h").removesuffix("/hour").strip().lstrip("$€£"))
    except ValueError:
        price = -1.0
    if price < 0:
        raise UserError(f"--price {text} is not a price an hour", hint="write it as 2.5/h")
    return price


def _model_and_data(spec: RunSpec, *, read_data: bool) -> tuple[Any, DataShape | None]:
    """The configuration, and the data's lengths where a tokenizer is at hand without a download of weights."""
    from gym_trainer.planning.source import data_shape, load_config

    config, folder = load_config(spec.model)
    if not read_data or folder is None:
        return config, None
    return config, data_shape(spec, folder)
