"""The daemon's settings: one TOML file, every field documented, checked before anything starts.

`gym serve --print-settings` writes the file with its documentation and the values in force. Command-line options
go before the file; keys come from `GYM_API_KEY` and `GYM_ADMIN_KEY` or from `gym keys`, never from this file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gym_sdk import folders
from gym_sdk.errors import SpecError, Where

MEBIBYTE = 1024 * 1024
GIBIBYTE = 1024 * MEBIBYTE


class Section(BaseModel):
    """Frozen, closed to unknown keys, strict about types; a field's documentation is the text under it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


class ServerSettings(Section):
    """`[server]`: addresses, certificates and the data directory."""

    host: str = "127.0.0.1"
    """The address to listen on. Any other than a loopback address needs keys, which are checked at start."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The HTTP port; 0 takes a free one and logs it."""

    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 50051
    """The gRPC port; 0 takes a free one and logs it."""

    data_dir: str = ""
    """Where jobs, files, models and keys live. When empty, `GYM_DATA_DIR`, or the platform's own place
    (`~/.local/share/gym`)."""

    tls_certificate: str = ""
    """A PEM file with the certificate chain, for HTTP and gRPC. Without one both speak plain text."""

    tls_key: str = ""
    """The PEM file with the certificate's private key."""

    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may go on after SIGTERM. Jobs are not requests: they outlive the daemon."""

    trusted_proxies: list[str] = []
    """Addresses whose `X-Forwarded-For` is believed, for the audit log."""


class LimitSettings(Section):
    """`[limits]`: what one request and one key may ask for."""

    max_request_bytes: Annotated[int, Field(ge=5 * MEBIBYTE)] = 32 * MEBIBYTE
    """The largest JSON body over HTTP, and the largest message over gRPC. A chunk of an upload (4 MiB) must fit."""

    max_file_bytes: Annotated[int, Field(ge=1)] = 8 * GIBIBYTE
    """The largest uploaded file."""

    max_storage_bytes_per_key: Annotated[int, Field(ge=1)] = 64 * GIBIBYTE
    """What the files of one key may take together."""

    requests_per_minute: Annotated[int, Field(ge=1)] = 6000
    """Calls of one key a minute, over HTTP and gRPC together; a burst may use a tenth of them at once."""

    max_streams: Annotated[int, Field(ge=1)] = 1024
    """Answers and event streams that may be open at once."""

    max_streams_per_key: Annotated[int, Field(ge=1)] = 256
    """Answers and event streams of one key that may be open at once."""

    max_request_s: Annotated[float, Field(gt=0)] = 3600.0
    """The longest time one answer may take. Clients may ask for less: `X-Request-Timeout-S`, or a gRPC deadline."""


class JobSettings(Section):
    """`[jobs]`: how many runs go side by side, and what they may use."""

    launcher: Literal["local", "slurm"] = "local"
    """Where jobs run: processes of this machine, or batch jobs of the Slurm cluster whose commands are on the daemon's
    PATH. The nodes must find the data directory and the daemon's Python under the same paths. `num_gpus` is then how
    many GPUs of the cluster all jobs may hold together, and each job's are on one node."""

    slurm_options: list[str] = []
    """Options of sbatch for every job, such as `["--partition=gpu", "--time=12:00:00", "--cpus-per-task=8"]`. A job is
    asked to stop `cancel_grace_s` and a minute before its time limit, and goes on from its checkpoint as a new batch
    job, up to `max_attempts` times."""

    slurm_settle_s: Annotated[float, Field(ge=0)] = 30.0
    """How long after a batch job has left the queue the files that it wrote may need to be seen here."""

    num_gpus: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """The GPUs that jobs may use, counted from the first; `auto` is all NVIDIA devices of this machine less those that
    the engine reserves (see `engine.gpu_policy`)."""

    max_cpu_jobs: Annotated[int, Field(ge=0)] = 1
    """Jobs without a GPU that may run side by side."""

    max_running_per_key: Annotated[int, Field(ge=1)] = 4
    """Jobs of one key that may run side by side."""

    max_queued_per_key: Annotated[int, Field(ge=1)] = 32
    """Jobs of one key that may wait; a further one is refused."""

    overtake_s: Annotated[float, Field(ge=0)] = 600.0
    """How long smaller jobs may start before a waiting one that does not fit yet; after that, GPUs are kept for it."""

    max_attempts: Annotated[int, Field(ge=1)] = 3
    """How often a job is started, the first time included, when its process or this machine dies under it.
    Each further start resumes from the last checkpoint. An error in the job itself is not tried again."""

    retry_delay_s: Annotated[float, Field(ge=0)] = 10.0
    """The wait before the second start; it doubles each time."""

    cancel_grace_s: Annotated[float, Field(ge=0)] = 15.0
    """How long a cancelled job may take to stop by itself before every process of it is killed."""

    command: list[str] = []
    """The `gym` command that trains, such as `["/opt/trainer/bin/gym"]` for a trainer in an environment of its own.
    The one beside this Python when empty."""

    environment: list[str] = []
    """Variables that jobs may see, by name, such as `HF_TOKEN` or `WANDB_API_KEY`. Beyond a short list that programs
    need to start (`PATH`, `HOME`, `LANG`, CUDA's and the cache folders), nothing else of the daemon's environment
    reaches them."""

    allow_hub_models: bool = True
    """Whether a job may name any model of the hub. Off, only models that the daemon serves or lists."""

    allow_remote_code: bool = False
    """Whether a job's `model.trust_remote_code` is honoured. Off, because that code can do anything the daemon can."""

    allowed_models: list[str] = []
    """Model sources (folders, `.gguf` files, `package:` names) that jobs may name besides hub ids."""


class FileSettings(Section):
    """`[files]`: uploads and garbage."""

    upload_expiry_s: Annotated[float, Field(gt=0)] = 24 * 3600.0
    """How long an upload may rest between two chunks before what was sent is dropped."""

    collect_every_s: Annotated[float, Field(gt=0)] = 600.0
    """How often expired uploads and content that nothing names any more are removed."""


class EngineSettings(Section):
    """`[engine]`: what generates."""

    kind: str = "transformers"
    """The engine: `transformers` (in a process of its own, on a CPU or one GPU), `vllm` (a vLLM server in an
    environment of its own, see the fields below), or another name registered under the entry point `gym.engines`."""

    model: str = ""
    """The base model, or a run directory, that is served from the start; none when empty."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$")] = "auto"
    """Where to generate: `cpu`, `cuda` (the last GPU), `cuda:N`; `auto` is `cuda` when there is one."""

    num_gpus: Annotated[int, Field(ge=1)] = 1
    """GPUs of a started vLLM server (with `--tensor-parallel-size` among `vllm_arguments`); `transformers` uses one."""

    gpu_policy: Literal["auto", "reserve", "yield", "share"] = "auto"
    """What happens where jobs and the engine want the same GPU. `reserve`: it is the engine's, jobs get the others.
    `yield`: jobs go first; while one holds the engine's GPU, models are out of memory and chats are refused with the
    time to try again. `share`: both at once, and you make sure that they fit. `auto` reserves where that leaves jobs a
    GPU, and yields on a machine with one."""

    yield_after_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running answers may go on when the engine has to make room for a job."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The precision of the weights; as in a run's `model.dtype`."""

    max_batch_size: Annotated[int, Field(ge=1)] = 32
    """Answers that are generated side by side; more wait their turn."""

    max_waiting: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait for their turn; further ones are refused with 429."""

    max_loaded_bases: Annotated[int, Field(ge=1)] = 1
    """Base models held in memory at once. Asking for another one unloads the one that was used least recently."""

    num_threads: Annotated[int, Field(ge=0)] = 0
    """Processor threads of the engine; 0 leaves the choice to torch."""

    vllm_url: str = ""
    """The address of a vLLM server that runs already, such as `http://127.0.0.1:8100`; it must serve `model`, and load
    adapters (`--enable-lora`, `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`) from this data directory. When empty, the daemon
    starts one with `vllm_command`."""

    vllm_api_key_env: str = ""
    """The environment variable that holds the key of the server at `vllm_url`, if it asks for one."""

    vllm_command: Annotated[list[str], Field(min_length=1)] = ["vllm"]
    """The `vllm` command to start a server with, such as `["/opt/vllm/bin/vllm"]`: vLLM pins versions of its own, so
    it is installed apart."""

    vllm_arguments: list[str] = []
    """Further arguments of `vllm serve`, such as `["--max-model-len", "8192"]`."""

    vllm_max_adapters: Annotated[int, Field(ge=1)] = 8
    """Adapters that may take part in one batch of a started server."""

    vllm_max_adapter_rank: Annotated[int, Field(ge=1)] = 64
    """The largest rank of an adapter that a started server takes."""

    vllm_start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long vLLM may take to load the model; large ones take many minutes."""


class LogSettings(Section):
    """`[log]`: what is written to stderr."""

    format: Literal["text", "json"] = "text"
    """One line a message for people, or one JSON object a line for machines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written."""


class Settings(Section):
    """The whole settings file."""

    server: ServerSettings = ServerSettings()
    """Addresses, certificates and the data directory."""

    limits: LimitSettings = LimitSettings()
    """What one request and one key may ask for."""

    jobs: JobSettings = JobSettings()
    """How many runs go side by side, and what they may use."""

    files: FileSettings = FileSettings()
    """Uploads and garbage."""

    engine: EngineSettings = EngineSettings()
    """What generates."""

    log: LogSettings = LogSettings()
    """What is written to stderr."""

    @model_validator(mode="after")
    def _check_launcher(self) -> Settings:
        if self.jobs.launcher == "slurm" and self.jobs.num_gpus == "auto":
            raise ValueError("jobs.num_gpus: say how many of the cluster's GPUs jobs may hold; Slurm has no auto")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Settings:
        if bool(self.server.tls_certificate) != bool(self.server.tls_key):
            raise ValueError("server.tls_certificate and server.tls_key go together: give both or neither")
        return self

    @property
    def data_dir(self) -> Path:
        """The data directory as an absolute path."""
        return Path(self.server.data_dir).expanduser().absolute() if self.server.data_dir else folders.data_dir()


def load_settings(path: Path | None, overrides: dict[str, dict[str, Any]]) -> Settings:
    """Settings of a TOML file (none: the defaults) under `overrides` (section, then field).

    Raises `SpecError` with the file and the field.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read the settings: {error.strerror}", where=Where(file=str(path))) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"not valid TOML: {error}", where=Where(file=str(path))) from None
    for section, fields in overrides.items():
        given = values.setdefault(section, {})
        if isinstance(given, dict):
            given.update(fields)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        hint = "gym serve --print-settings shows every field" if first["type"] == "extra_forbidden" else None
        message = first["msg"] if first["type"] != "extra_forbidden" else "unknown setting"
        raise SpecError(
            message.removeprefix("Value error, "),
            where=Where(file=str(path) if path else None, path=place or None),
            hint=hint,
        ) from None


def render_settings(settings: Settings) -> str:
    """The settings as a TOML file whose comments are the fields' documentation."""
    return "\n".join(_render(settings))


def _render(settings: Settings) -> Iterator[str]:
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        yield f"[{name}]"
        for field_name, field in type(section).model_fields.items():
            for line in (field.description or "").splitlines():
                yield f"# {line.strip()}"
            # JSON's text, numbers, booleans and lists are TOML's too.
            yield f"{field_name} = {json.dumps(getattr(section, field_name), ensure_ascii=False)}"
            yield ""
