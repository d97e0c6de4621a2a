"""Training steps measured: the usual way, then Gym's parts switched on one after another, in one process.

Weights are random: speed and memory do not depend on them. Each row is the mean of `num_steps` whole optimizer steps
after `num_warm_steps`, between two synchronisations; the ceiling is a matrix product timed cold in the same process.
"""

from __future__ import annotations

import dataclasses
import gc
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gym_data import Document
from gym_sdk.errors import GymError
from gym_trainer.bench import documents as rows
from gym_trainer.bench.peers import PeerReport, PeerRow, run_trl, run_unsloth, trl_ways
from gym_trainer.fast import attention
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.head import split
from gym_trainer.fast.host_memory import keep_freed_memory
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
    prompts: tuple[int, ...] | None = None
    """The tokens at the beginning of each that are not trained; none when not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtypes: tuple[str, ...] | None = None
    """bfloat16 on a CUDA device, float32 on a processor when not given."""
    price_per_hour: float | None = None
    """Of the machine."""
    trl: str | None = None
    """An interpreter that has TRL, to be measured beside Gym."""
    unsloth: str | None = None
    """The same for Unsloth."""
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
    trained_tokens_per_s: float
    """Tokens that bear loss."""
    cost_per_1000_tokens: float | None = None
    """In the currency of the price, where one was given."""
    first_loss: float | None = None
    """Of the very first step, where it was kept: the same weights, the same tokens."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Every row, and where it was measured."""

    device: str
    dtype: str
    torch: str = torch.__version__
    transformers: str = transformers.__version__
    python: str = platform.python_version()
    matmul_flops_per_s: dict[str, float]
    """By dtype."""
    flops_per_token: float
    peers: dict[str, str] = field(default_factory=dict)
    """Their versions."""
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Rows that could not be measured, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_train(
    config: PreTrainedConfig, settings: BenchSettings, *, on_row: Callable[[Row], None] = lambda row: None
) -> BenchReport:
    """Measure on the CUDA device, or on the processor where there is none or it is asked for."""
    use_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if use_cuda else "cpu")
    dtypes = settings.dtypes or ("bfloat16" if use_cuda else "float32",)
    if device.type == "cpu":
        keep_freed_memory()
    made = rows.documents(
        settings.lengths, settings.prompts or (0,) * len(settings.lengths), config.get_text_config().vocab_size
    )
    report = BenchReport(
        device=torch.cuda.get_device_name() if use_cuda else f"cpu, {torch.get_num_threads()} threads",
        dtype=", ".join(dtypes),
        matmul_flops_per_s={name: cold_matmul_flops_per_s(device, getattr(torch, name)) for name in dtypes},
        flops_per_token=_flops_of(config, settings),
    )

    def add(row: Row) -> None:
        if settings.price_per_hour is not None:
            row = dataclasses.replace(
                row, cost_per_1000_tokens=settings.price_per_hour / 3600 * 1000 / row.throughput_tokens_per_s
            )
        report.rows.append(row)
        on_row(row)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for dtype in dtypes:
            _own_rows(config, settings, made, report, add, device, dtype)
        for name, peer in _peer_reports(config, settings, made, device, dtypes):
            report.peers[name] = peer.version
            report.failures.update(peer.failures)
            for row in peer.rows:
                add(_row_of_peer(row, settings, made, report))
    return report


def _own_rows(
    config: PreTrainedConfig,
    settings: BenchSettings,
    made: list[Document],
    report: BenchReport,
    add: Callable[[Row], None],
    device: torch.device,
    dtype: str,
) -> None:
    """transformers as it is, Gym's parts one after another, and the whole of `gym train`."""
    suffix = f", {dtype}" if len(report.matmul_flops_per_s) > 1 else ""
    bench = _Bench(_model(config, settings, device, getattr(torch, dtype)), settings, device, made)
    for name, run, fast in bench.ways():
        try:
            with applied(bench.model, fast, _refuse) if fast is not None else nullcontext():
                row = bench.measure(name + suffix, run, report, dtype)
        except (RuntimeError, ImportError) as error:
            report.failures[name + suffix] = str(error).splitlines()[0]
            continue
        finally:
            bench.clean_up()
        add(row)
    del bench
    from gym_trainer.bench.whole_run import measure_run

    name = f"gym train, as planned{suffix}"
    try:
        facts = measure_run(config, settings, made, device.type, getattr(torch, dtype))
    except (GymError, RuntimeError) as error:
        report.failures[name] = str(error).splitlines()[0]
    else:
        add(_row_of_peer(PeerRow(name=name, dtype=dtype, **facts), settings, made, report))
    _free(device)


def _peer_reports(
    config: PreTrainedConfig, settings: BenchSettings, made: list[Document], device: torch.device, dtypes: Any
) -> Iterator[tuple[str, PeerReport]]:
    """What other interpreters measured; the device is theirs alone meanwhile."""
    shared = {
        "device": device.type,
        "rank": settings.rank,
        "num_steps": settings.num_steps,
        "num_warm_steps": settings.num_warm_steps,
        "num_threads": torch.get_num_threads() if device.type == "cpu" else None,
        "learning_rate": _LEARNING_RATE,
    }
    if settings.trl:
        ways = trl_ways(device.type, dtypes, len(made), lora=settings.rank > 0)
        work = {"config": config.to_dict(), "rows": rows.plain_rows(made), "ways": ways}
        yield "TRL", run_trl(settings.trl, shared | work)
    if settings.unsloth:
        with tempfile.TemporaryDirectory(prefix="gym-bench-") as folder:
            _write_model(config, Path(folder), device)
            _free(device)
            work = {"rows": rows.plain_rows(made), "rows_at_once": [len(made)]}
            yield "Unsloth", run_unsloth(settings.unsloth, shared | work, Path(folder))


def _write_model(config: PreTrainedConfig, folder: Path, device: torch.device) -> None:
    """Random weights as a folder, with a tokenizer that nobody reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    with device:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    inner = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)


def _row_of_peer(row: PeerRow, settings: BenchSettings, made: list[Document], report: BenchReport) -> Row:
    throughput = sum(settings.lengths) / row.step_time_s
    return Row(
        name=row.name,
        throughput_tokens_per_s=throughput,
        step_time_s=row.step_time_s,
        first_steps_s=row.first_steps_s,
        peak_memory_bytes=row.peak_memory_bytes,
        loss=row.loss,
        first_loss=row.first_loss,
        share_of_ceiling=throughput * report.flops_per_token / report.matmul_flops_per_s[row.dtype],
        trained_tokens_per_s=sum(int(document.loss_mask.sum()) for document in made) / row.step_time_s,
    )


def _flops_of(config: PreTrainedConfig, settings: BenchSettings) -> float:
    return flops_per_token(_model(config, settings, torch.device("meta"), torch.bfloat16), settings.lengths)


class _Bench:
    """A model, the documents of a step, and each way of training on them."""

    def __init__(self, model: Any, settings: BenchSettings, device: torch.device, made: list[Document]) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, fused=True)
        lengths = settings.lengths
        ids_T = torch.cat([torch.from_numpy(document.ids.astype(np.int64)) for document in made])
        trained_T = torch.cat([torch.from_numpy(document.loss_mask) for document in made]).bool()
        self.num_trained = int(trained_T.sum())
        self.ids_1T = ids_T[None].to(device)
        self.layout = PackedLayout.from_lengths(lengths, device)
        self.labels_T = torch.cat([ids_T.masked_fill(~trained_T, IGNORE)[1:], torch.tensor([IGNORE])])
        self.labels_T[torch.tensor(lengths).cumsum(0) - 1] = IGNORE
        shape = len(lengths), max(lengths)
        self.padded_BL = torch.zeros(shape, dtype=torch.long, device=device)
        self.padded_labels_BL = torch.full(shape, IGNORE, device=device)
        self.mask_BL = torch.zeros_like(self.padded_BL)
        parts = zip(ids_T.split(lengths), trained_T.split(lengths), strict=True)
        for row, (ids, trained) in enumerate(parts):
            self.padded_BL[row, : len(ids)] = ids.to(device)
            self.padded_labels_BL[row, : len(ids)] = ids.masked_fill(~trained, IGNORE).to(device)
            self.mask_BL[row, : len(ids)] = 1

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
        labels_BL = self.padded_labels_BL
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

    def measure(self, name: str, run: Callable[[], torch.Tensor], report: BenchReport, dtype: str) -> Row:
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
            share_of_ceiling=throughput * report.flops_per_token / report.matmul_flops_per_s[dtype],
            trained_tokens_per_s=self.num_trained / step_s,
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
        _free(self.device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
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
    peers = "".join(f", {name} {version}" for name, version in report.peers.items())
    rates = ", ".join(f"{rate / 1e12:,.2f} ({name})" for name, rate in report.matmul_flops_per_s.items())
    priced = any(row.cost_per_1000_tokens is not None for row in report.rows)
    width = max((len(row.name) for row in report.rows), default=20) + 2
    lines = [
        f"{report.device}, torch {report.torch}, transformers {report.transformers}{peers}",
        f"matrix product, TFLOP/s: {rates}; {report.flops_per_token / 1e9:.2f} GFLOP a token",
        "",
        f"{'':<{width}}{'tokens/s':>9}{'trained':>9}{'step':>10}{'peak GiB':>10}{'of limit':>9}"
        f"{'  cost/1000' * priced}{'speed-up':>9}",
    ]
    fastest = max((row.throughput_tokens_per_s for row in report.rows), default=1.0)
    for row in report.rows:
        lines.append(
            f"{row.name:<{width}}{row.throughput_tokens_per_s:>9,.0f}{row.trained_tokens_per_s:>9,.0f}"
            f"{row.step_time_s * 1000:>7,.0f} ms"
            f"{row.peak_memory_bytes / 2**30:>10.2f}{row.share_of_ceiling:>9.2f}"
            f"{'' if row.cost_per_1000_tokens is None else f'{row.cost_per_1000_tokens:>11.6f}'}"
            f"{row.throughput_tokens_per_s / report.rows[0].throughput_tokens_per_s:>8.2f}x"
            f"  {'█' * round(20 * row.throughput_tokens_per_s / fastest)}"
        )
    lines += [f"{name:<{width}}  not measured: {reason}" for name, reason in report.failures.items()]
    return "\n".join(lines)
