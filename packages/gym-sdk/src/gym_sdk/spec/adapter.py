"""`adapter:` which weights are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import FilePath, SpecModel


class LoraAdapter(SpecModel):
    """Low-rank updates beside frozen weights (LoRA, arXiv 2106.09685)."""

    kind: Literal["lora"] = "lora"
    """Low-rank adaptation."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """The inner dimension of each update. 8 to 32 suit most tasks; memory and file size grow in proportion."""

    alpha: Annotated[float, Field(gt=0)] | None = None
    """The update's numerator: it is scaled by alpha/rank (alpha/sqrt(rank) under rslora). Twice the rank when
    not given."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of adapter inputs zeroed in training. 0, because it costs speed and helps only on small data."""

    init: Literal["default", "pissa", "olora"] = "default"
    """How A and B start: `default` leaves the model unchanged; `pissa` (arXiv 2404.02948) and `olora`
    (arXiv 2406.01775) take the main directions of the weight."""

    scaling: Literal["standard", "rslora"] = "standard"
    """alpha/rank, or alpha/sqrt(rank), which keeps high ranks learning (rsLoRA, arXiv 2312.03732)."""

    dora: bool = False
    """Learn the magnitude of each output apart from its direction (DoRA, arXiv 2402.09353). Slower, often
    better at low rank."""

    targets: str | list[str] = "all-linear"
    """The modules to adapt: `all-linear`, a list of name endings (`[q_proj, v_proj]`), or one regular expression."""

    init_from: Annotated[str, FilePath()] | None = None
    """A folder with an adapter to start from, such as the SFT adapter before a preference run."""


class FullAdapter(SpecModel):
    """No adapter: every weight is trained."""

    kind: Literal["full"] = "full"
    """Full fine-tuning."""


AdapterSpec = Annotated[LoraAdapter | FullAdapter, Field(discriminator="kind")]
