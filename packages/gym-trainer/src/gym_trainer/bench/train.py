"""Training steps measured: the usual way, then Gym's parts switched on one after another, in one process.

Weights are random: speed and memory do not depend on them. Each row is the mean of `num_steps` whole optimizer steps
after `num_warm_steps`, between two synchronisations; the ceiling is a matrix product timed cold in the same process.
"""

from __future__ import annotations

import dataclasses
import gc
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gym_trainer.fast import attention
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.head import split
from gym_trainer.fast.layers import decoder_layers
from gym_trainer.fast.loss import IGNORE, linear_cross_entropy
from gym_trainer.fast.packing import PackedLayout

_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    rank: int = 16
    """Of LoRA on every linear layer; 0 trains every weight."""
    lengths: tuple[int, ...] = (2048,) * 4
    """The documents of a step."""
    num_steps: int = 5
    num_warm_steps: int = 2
    compile: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of training, measured."""

    name: str
    throughput_tokens_per_s: float
    """Tokens of documents, padding left out."""
    step_time_s: float
    first_steps_s: float
    """The warm-up, with what is compiled in it."""
    peak_memory_bytes: int
    """Allocated on the CUDA device; 0 on a processor."""
    loss: float
    share_of_ceiling: float
    """Of what the arithmetic alone would reach at the rate of the timed matrix product."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Every row, and where it was measured."""

    device: str
    dtype: str
    torch: str = torch.__version__
    transformers: str = transformers.__version__
    python: str = platform.python_version()
    matmul_flops_per_s: float
    flops_per_token: float
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Rows that could not be measured, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_train(
    config: PreTrainedConfig, settings: BenchSettings, *, on_row: Callable[[Row], None] = lambda row: None
) -> BenchReport:
    """Measure on the CUDA device, or on the processor where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate = cold_matmul_flops_per_s(device, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = _model(config, settings, device, dtype)
        bench = _Bench(model, settings, device)
        report = BenchReport(
            device=torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
            dtype=str(dtype).removeprefix("torch."),
            matmul_flops_per_s=rate,
            flops_per_token=flops_per_token(model, settings.lengths),
        )
        for name, run, fast in bench.ways():
            try:
                with applied(model, fast, _refuse) if fast is not None else nullcontext():
                    row = bench.measure(name, run, report)
            except (RuntimeError, ImportError) as error:
                report.failures[name] = str(error).splitlines()[0]
                continue
            finally:
                bench.clean_up()
            report.rows.append(row)
            on_row(row)
    return report


class _Bench:
    """A model, the documents of a step, and each way of training on them."""

    def __init__(self, model: Any, settings: BenchSettings, device: torch.device) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, fused=True)
        lengths = settings.lengths
        generator = torch.Generator().manual_seed(1)
        vocab_size = self.causal.config.get_text_config().vocab_size
        self.ids_1T = torch.randint(0, vocab_size, (1, sum(lengths)), generator=generator).to(device)
        self.layout = PackedLayout.from_lengths(lengths, device)
        self.labels_T = torch.cat([self.ids_1T[0, 1:].cpu(), torch.tensor([IGNORE])])
        self.labels_T[torch.tensor(lengths).cumsum(0) - 1] = IGNORE
        self.padded_BL = torch.zeros(len(lengths), max(lengths), dtype=torch.long, device=device)
        self.mask_BL = torch.zeros_like(self.padded_BL)
        for row, document in enumerate(self.ids_1T[0].split(lengths)):
            self.padded_BL[row, : len(document)] = document
            self.mask_BL[row, : len(document)] = 1

    def ways(self) -> Any:
        """Name, step and transforms of each row; what comes between two rows is done between them."""
        on_cuda = self.device.type == "cuda"
        lora = self.settings.rank > 0
        usual = "transformers + peft" if lora else "transformers"
        if on_cuda:
            self.causal.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.enable_input_require_grads()
            yield f"{usual}, padded, full recompute", self.padded, None
            self.causal.gradient_checkpointing_disable()
            self.model.disable_input_require_grads()
        else:
            yield f"{usual}, padded", self.padded, None
        every_layer = len(decoder_layers(self.model))
        dtype = next(self.model.parameters()).dtype
        name = attention.choose(self.causal.config, self.device, dtype)
        with attention.attention_of(self.causal, name):
            self.body, self.head = split(self.model)
            plain = FastPath(lean_lora=False)
            if on_cuda:
                yield "gym: packed, chunked loss, full recompute", self.packed, plain.with_recompute(every_layer)
            yield "gym: packed, chunked loss", self.packed, plain
            if lora:
                yield "gym: + lean LoRA products", self.packed, FastPath()
            if lora and on_cuda:
                fused = FastPath(fused=True)
                yield "gym: fused layers", self.packed, fused
                fused = fused.with_recompute(every_layer)
                yield "gym: fused, every layer recomputed", self.packed, fused
                yield "gym: the same, inputs in host memory", self.packed, dataclasses.replace(fused, offload=True)
            if self.settings.compile:
                yield "gym: + compiled layers", self.packed, FastPath(compile=True)
                if on_cuda:
                    compiled = FastPath(compile=True, recompute_layers=every_layer)
                    yield "gym: compiled, every layer recomputed", self.packed, compiled

    def padded(self) -> torch.Tensor:
        """Rows padded to the longest, and the model's own loss."""
        labels_BL = self.padded_BL.masked_fill(self.mask_BL == 0, IGNORE)
        mask_BL = None if bool((self.mask_BL == 1).all()) else self.mask_BL
        autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with autocast:
            loss = self.model(self.padded_BL, attention_mask=mask_BL, labels=labels_BL, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def packed(self) -> torch.Tensor:
        """Rows side by side, and the chunked loss."""
        hidden_TD = self.body(input_ids=self.ids_1T, use_cache=False, **self.layout.model_kwargs()).last_hidden_state[0]
        result = linear_cross_entropy(hidden_TD, self.head, self.labels_T)
        loss = result.loss_sum / result.num_tokens
        loss.backward()
        return loss.detach()

    def measure(self, name: str, run: Callable[[], torch.Tensor], report: BenchReport) -> Row:
        """Warm up, then time whole optimizer steps."""
        settings = self.settings
        start = time.perf_counter()
        self._steps(run, settings.num_warm_steps)
        warm_s = time.perf_counter() - start
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = self._steps(run, settings.num_steps)
        step_s = (time.perf_counter() - start) / settings.num_steps
        throughput = sum(settings.lengths) / step_s
        return Row(
            name=name,
            throughput_tokens_per_s=throughput,
            step_time_s=step_s,
            first_steps_s=warm_s,
            peak_memory_bytes=torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0,
            loss=float(loss),
            share_of_ceiling=throughput * report.flops_per_token / report.matmul_flops_per_s,
        )

    def _steps(self, run: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
        loss = torch.zeros(())
        for _ in range(count):
            loss = run()
            self.optimizer.step()
            self.optimizer.zero_grad()
        _wait(self.device)
        return loss

    def clean_up(self) -> None:
        """Nothing of one row is left for the next."""
        self.optimizer.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _refuse(reason: str) -> None:
    raise RuntimeError(f"not fused: {reason}")


def _model(config: PreTrainedConfig, settings: BenchSettings, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if settings.rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    return model.train()


def flops_per_token(model: Any, lengths: tuple[int, ...]) -> float:
    """2 a weight forwards and 2 for the inputs' gradients, 2 more for trained weights; attention by its pairs."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding = causal.get_input_embeddings().weight
    head = causal.get_output_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and (p is not embedding or p is head)]
    products = sum((6.0 if p.requires_grad else 4.0) * p.numel() for p in matrices)
    text = causal.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = sum(n * (n + 1) / 2 for n in lengths) / sum(lengths)
    return products + 3.5 * 4 * text.num_attention_heads * head_dim * pairs * text.num_hidden_layers


def cold_matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The median of five large products after two, before anything else has warmed the device."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    times = []
    for repeat in range(7):
        start = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return 2 * size**3 / sorted(times)[2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def render(report: BenchReport) -> str:
    """A table, with a bar for each row's speed."""
    lines = [
        f"{report.device}, {report.dtype}, torch {report.torch}, transformers {report.transformers}",
        f"matrix product {report.matmul_flops_per_s / 1e12:,.1f} TFLOP/s, "
        f"{report.flops_per_token / 1e9:.2f} GFLOP a token",
        "",
        f"{'':<42}{'tokens/s':>9}{'step':>10}{'peak GiB':>10}{'of limit':>9}{'speed-up':>9}",
    ]
    fastest = max((row.throughput_tokens_per_s for row in report.rows), default=1.0)
    for row in report.rows:
        lines.append(
            f"{row.name:<42}{row.throughput_tokens_per_s:>9,.0f}{row.step_time_s * 1000:>7,.0f} ms"
            f"{row.peak_memory_bytes / 2**30:>10.2f}{row.share_of_ceiling:>9.2f}"
            f"{row.throughput_tokens_per_s / report.rows[0].throughput_tokens_per_s:>8.2f}x"
            f"  {'█' * round(20 * row.throughput_tokens_per_s / fastest)}"
        )
    lines += [f"{name:<42}  not measured: {reason}" for name, reason in report.failures.items()]
    return "\n".join(lines)
