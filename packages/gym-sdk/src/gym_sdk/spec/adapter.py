"""`adapter:` which weights are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import FilePath, SpecModel


class NamedAdapter(SpecModel):
    """An adapter that is loaded beside the trained one, frozen, under a name of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
    """What the run calls it: letters, digits, dash and underscore. The trained adapter is `default`, as in peft."""

    source: Annotated[str, FilePath()]
    """A folder with the adapter, such as another run's `adapter/`, of the same kind and for the same model."""


class _Adapter(SpecModel):
    """What every adapter beside frozen weights has."""

    targets: str | list[str] = "all-linear"
    """The modules to adapt: `all-linear`, a list of name endings (`[q_proj, v_proj]`), or one regular expression."""

    modules_to_save: list[str] = []
    """Modules that are trained whole and saved with the adapter, by name endings, such as `[lm_head]`."""

    init_from: Annotated[str, FilePath()] | None = None
    """A folder with an adapter to start from, such as the SFT adapter before a preference run. It keeps its rank, its
    targets and the like; others beside it are refused."""

    beside: list[NamedAdapter] = []
    """Other adapters in the same model, each by its name and kept apart: training computes without them and leaves
    them bit for bit as they were. One of them may be a preference method's reference (`method.reference_adapter`). The
    run keeps each in `adapters/NAME`, which `gym chat` and `gym export --adapter NAME` take."""


class LoraAdapter(_Adapter):
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

    init: Literal["default", "pissa", "olora", "eva", "loftq"] = "default"
    """How A and B start: `default` leaves the model unchanged; `pissa` (arXiv 2404.02948) and `olora`
    (arXiv 2406.01775) take the main directions of the weight; `eva` (arXiv 2410.07170) those of the layer's inputs on
    the first rows, with more of the rank where they need it; `loftq` (arXiv 2310.08659) makes up for what quantization
    to nf4 lost, and needs a CUDA device."""

    scaling: Literal["standard", "rslora"] = "standard"
    """alpha/rank, or alpha/sqrt(rank), which keeps high ranks learning (rsLoRA, arXiv 2312.03732)."""

    dora: bool = False
    """Learn the magnitude of each output apart from its direction (DoRA, arXiv 2402.09353). Slower, often
    better at low rank."""

    lora_plus_factor: Annotated[float | None, Field(ge=1, examples=[16.0])] = None
    """How many times the learning rate of A that of B is (LoRA+, arXiv 2402.12354); 16 is usual. The same when not
    given."""

    experts: Literal["frozen", "adapt"] = "frozen"
    """What happens to the fused expert weights of a mixture of experts, which are no linear layers: `frozen`, or
    `adapt`, an update of this rank for each expert. Experts that are linear layers follow `targets`."""


class OftAdapter(_Adapter):
    """Rotations of each layer's inputs (orthogonal fine-tuning, OFTv2, arXiv 2506.19847)."""

    kind: Literal["oft"] = "oft"
    """Orthogonal fine-tuning: lengths and angles between neurons stay."""

    block_size: Annotated[int, Field(ge=2)] = 32
    """The size of each rotated block of inputs, which it must divide."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of blocks left unrotated in training."""


class VeraAdapter(_Adapter):
    """Two trained vectors a layer around random matrices that all layers share (VeRA, arXiv 2310.11454)."""

    kind: Literal["vera"] = "vera"
    """Vector-based random matrix adaptation: the smallest files."""

    rank: Annotated[int, Field(ge=1, le=65536)] = 256
    """The inner dimension of the shared matrices; it costs little, and is far larger than LoRA's."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of adapter inputs zeroed in training."""


class Ia3Adapter(_Adapter):
    """A trained factor for each output of keys, values and feed-forward layers (IA3, arXiv 2205.05638)."""

    kind: Literal["ia3"] = "ia3"
    """Rescaled activations."""

    feedforward: list[str] = ["down_proj", "fc2", "c_proj", "dense_4h_to_h"]
    """Name endings of layers whose inputs are rescaled instead of their outputs. Those that are no target do not
    count."""


class FreezeAdapter(SpecModel):
    """No adapter: the last decoder layers are trained, and everything before them is frozen."""

    kind: Literal["freeze"] = "freeze"
    """Training of the last layers; the result is a whole model."""

    num_layers: Annotated[int, Field(ge=1)] = 2
    """How many of the last decoder layers are trained."""

    modules_to_save: list[str] = []
    """Modules that are trained beside them, by name endings, such as `[norm, lm_head]`."""


class FullAdapter(SpecModel):
    """No adapter: every weight is trained."""

    kind: Literal["full"] = "full"
    """Full fine-tuning."""


AdapterSpec = Annotated[
    LoraAdapter | OftAdapter | VeraAdapter | Ia3Adapter | FreezeAdapter | FullAdapter, Field(discriminator="kind")
]


PEFT_PREFIXES = {"lora": "lora_", "oft": "oft_", "vera": "vera_lambda_", "ia3": "ia3_"}
"""What peft's own names of an adapter's weights begin with, by kind; it mistakes a part of it for one."""


def adapters_beside(adapter: AdapterSpec) -> list[NamedAdapter]:
    """The frozen adapters of a run; a whole model has none."""
    return [] if isinstance(adapter, FreezeAdapter | FullAdapter) else adapter.beside


def is_whole_model(adapter: AdapterSpec) -> bool:
    """Whether the model's own weights are trained, so that the result is a model instead of an adapter."""
    return adapter.kind in ("full", "freeze")
