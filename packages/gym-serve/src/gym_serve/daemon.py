"""The daemon: one process with HTTP and gRPC on one set of services; engines and jobs are processes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import ssl
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import IO

import uvicorn

from gym_sdk._proto.gym.v1 import files_pb2, inference_pb2, jobs_pb2, models_pb2, server_pb2
from gym_sdk.client import local_key_path
from gym_sdk.errors import GymError, OutputInUse, UserError, Where
from gym_sdk.spec import SPEC_VERSION
from gym_serve._changes import Changes
from gym_serve._database import Database
from gym_serve.auth import JobKeys, Key, Keyring, ensure_local_key, list_keys, take_environment_keys, write_private
from gym_serve.catalog import Catalog, Model
from gym_serve.files.blobs import BlobStore
from gym_serve.files.service import FileService
from gym_serve.first_model import register
from gym_serve.generation import Generation
from gym_serve.gpus import GpuPlan, plan_gpus
from gym_serve.grpc import convert
from gym_serve.grpc.dispatch import Method, methods
from gym_serve.grpc.files import FileRpc
from gym_serve.grpc.inference import InferenceRpc
from gym_serve.grpc.jobs import JobRpc
from gym_serve.grpc.models import ModelRpc
from gym_serve.grpc.server import GrpcServer
from gym_serve.grpc.server_info import KeyRpc, ServerRpc
from gym_serve.http.chat import chat_routes
from gym_serve.http.completions import completion_routes
from gym_serve.http.connect import connect_routes
from gym_serve.http.files import file_routes
from gym_serve.http.fine_tuning import fine_tuning_routes
from gym_serve.http.gateway import Gateway
from gym_serve.http.models import model_routes
from gym_serve.http.openapi import openapi_routes
from gym_serve.http.operations import operation_routes
from gym_serve.jobs.environment import count_gpus
from gym_serve.jobs.results import JobResults
from gym_serve.jobs.runner import JobRunner
from gym_serve.jobs.service import JobService
from gym_serve.launchers.base import Launcher
from gym_serve.launchers.local import LocalLauncher
from gym_serve.launchers.slurm import SlurmLauncher
from gym_serve.limits import RateLimiter, StreamLimiter
from gym_serve.listening import is_loopback, join_address, listen, port_taken, take_inherited
from gym_serve.metrics import Metrics
from gym_serve.model_store import ModelStore
from gym_serve.serving import Presence, Serving, find_factory
from gym_serve.settings import Settings

logger: logging.Logger = logging.getLogger(__name__)

ADDRESS_FILE = "daemon.json"
"""In the data directory: the addresses and process id of the daemon that runs there."""


class Daemon:
    """Everything that one data directory's daemon is made of. `start`, then `stop`."""

    def __init__(self, settings: Settings) -> None:
        """Opens the data directory. Raises `OutputInUse` where another daemon has it."""
        self.settings: Settings = settings
        data_dir = settings.data_dir
        self._lock = _take(data_dir)
        self.database: Database = Database(data_dir / "gym.db")
        self.metrics: Metrics = Metrics()
        environment_keys = take_environment_keys(os.environ)
        job_keys = JobKeys(data_dir / "jobs.secret")
        self.keyring: Keyring = Keyring(self.database, environment_keys, job_keys)
        self._inherited = take_inherited(os.environ)
        hosts = {settings.server.host, *(sock.getsockname()[0] for sock in self._inherited)}
        self._check_bind(hosts, environment_keys.values())
        self.rates: RateLimiter = RateLimiter(settings.limits)
        self.streams: StreamLimiter = StreamLimiter(settings.limits)
        self.files: FileService = FileService(self.database, BlobStore(data_dir), settings.limits, settings.files)
        self.catalog: Catalog = Catalog(self.database, ModelStore(data_dir / "models"))
        self.gpus: GpuPlan = plan_gpus(settings, count_gpus(os.environ))
        engine = settings.engine.model_copy(update={"device": self.gpus.device})
        self.serving: Serving = Serving(self.catalog, engine, find_factory(engine.kind))
        self.generation: Generation = Generation(self.catalog, self.serving, self.metrics, settings)
        self.results: JobResults = JobResults(self.database, self.files, self.catalog, self.serving.load_beside)
        self.num_gpus: int = self.gpus.num_for_jobs
        changes = Changes()
        jobs_dir = data_dir / "jobs"
        self.runner: JobRunner = JobRunner(
            database=self.database,
            launcher=_launcher(settings),
            settings=settings.jobs,
            num_gpus=self.num_gpus,
            jobs_dir=jobs_dir,
            changes=changes,
            register_model=self.results.register,
            on_gpus_held=self._share_gpus,
            job_key=job_keys.secret_of,
            metrics=self.metrics,
        )
        self.jobs: JobService = JobService(
            database=self.database,
            files=self.files,
            models=self.catalog,
            runner=self.runner,
            changes=changes,
            settings=settings.jobs,
            num_gpus=self.num_gpus,
            jobs_dir=jobs_dir,
            own_url=lambda: self.http_url,
        )
        self.draining: bool = False
        self.http_url: str = ""
        self.grpc_target: str = ""
        self._first: Model | None = None
        self._yielded = False
        self._background: list[asyncio.Task[None]] = []
        self.metrics.add_gauges(self._gauges)

    def rpc_methods(self) -> list[Method]:
        """Every method of gym.v1, with what answers it."""
        expiry_s = self.settings.files.upload_expiry_s
        implementations: dict[str, object] = {
            "FileService": FileRpc(self.files, expiry_s),
            "JobService": JobRpc(self.jobs, self.catalog),
            "ModelService": ModelRpc(self.catalog, self.serving, self.files, self.jobs, self.results),
            "InferenceService": InferenceRpc(self.generation),
            "ServerService": ServerRpc(self._info),
            "KeyService": KeyRpc(self.database, self.keyring),
        }
        schema = (files_pb2, jobs_pb2, models_pb2, inference_pb2, server_pb2)
        return [method for file in schema for method in methods(file.DESCRIPTOR, implementations)]

    def http_app(self) -> Gateway:
        """The HTTP side as one ASGI application."""
        return Gateway(
            [
                *operation_routes(self.metrics, self.readiness),
                *openapi_routes(),
                *chat_routes(self.generation, self.streams),
                *completion_routes(self.generation, self.streams),
                *model_routes(self.catalog, self.serving),
                *file_routes(self.files, self.settings.files.upload_expiry_s),
                *fine_tuning_routes(self.jobs, self.catalog),
                *connect_routes(self.rpc_methods(), self.streams),
            ],
            keyring=self.keyring,
            rates=self.rates,
            metrics=self.metrics,
            max_request_bytes=self.settings.limits.max_request_bytes,
        )

    async def start(self) -> None:
        """Reads the state, then listens, then takes up the jobs and loads the first model."""
        server = self.settings.server
        key_path = local_key_path(self.settings.data_dir)
        await self.database.write(lambda connection: ensure_local_key(connection, key_path))
        await self.catalog.load()
        if self.settings.engine.model:
            self._first = await register(self.catalog, self.settings.engine.model)
        certificate = _certificate(self.settings)
        self._grpc = GrpcServer(
            self.rpc_methods(),
            keyring=self.keyring,
            rates=self.rates,
            streams=self.streams,
            metrics=self.metrics,
            max_message_bytes=self.settings.limits.max_request_bytes,
        )
        sockets = self._inherited or [listen(server.host, server.port)]
        try:
            grpc_port = await self._grpc.start(join_address(server.host, server.grpc_port), certificate)
        except RuntimeError:
            for sock in sockets:
                sock.close()
            raise port_taken(server.host, server.grpc_port, "--grpc-port") from None
        self._http = _HttpServer(
            uvicorn.Config(
                self.http_app(),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=bool(server.trusted_proxies),
                forwarded_allow_ips=server.trusted_proxies or None,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(server.drain_timeout_s) or None,
                ssl_certfile=server.tls_certificate or None,
                ssl_keyfile=server.tls_key or None,
            )
        )
        self._serving_http = asyncio.create_task(self._http.serve(sockets), name="http")
        scheme = "s" if certificate else ""
        http_host, http_port = sockets[0].getsockname()[:2]
        self.http_url = f"http{scheme}://{join_address(http_host if self._inherited else server.host, http_port)}"
        self.grpc_target = f"grpc{scheme}://{join_address(server.host, grpc_port)}"
        await self._grpc.set_serving(True)
        await self.runner.recover()
        self._background.append(asyncio.create_task(self.files.collect_forever(), name="collect"))
        if self._first is not None and not self._yielded:
            self._background.append(asyncio.create_task(self._load_first(self._first), name="first-model"))
        addresses = {"pid": os.getpid(), "http_url": self.http_url, "grpc_target": self.grpc_target}
        write_private(self.settings.data_dir / ADDRESS_FILE, json.dumps(addresses))
        logger.info("listening at %s and %s; this machine's key is in %s", self.http_url, self.grpc_target, key_path)

    async def stop(self) -> None:
        """Takes no new calls, lets those that run end, and leaves the jobs running."""
        if self.draining:
            return
        self.draining = True
        logger.info("draining: %d requests are open, %d jobs go on", self.streams.num_open, self.runner.num_running)
        with contextlib.suppress(FileNotFoundError):
            (self.settings.data_dir / ADDRESS_FILE).unlink()
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(self.settings.server.drain_timeout_s), self._serving_http)
        await self.runner.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.serving.close()
        self.database.close()
        self._lock.close()
        logger.info("stopped")

    def readiness(self) -> dict[str, str]:
        """A word for each part."""
        parts = {"server": "draining" if self.draining else "ok"}
        if self._first is not None:
            presence, message = self.serving.presence(self._first)
            parts["model"] = "ok" if presence is Presence.LOADED else message or presence.value
        return parts

    async def _share_gpus(self, held: frozenset[int]) -> None:
        """Jobs hold these GPUs: the engine leaves its own, or comes back to it."""
        away = self.gpus.must_yield(held)
        if away and not self._yielded:
            self._yielded = True
            logger.info("the models leave GPU %s to a job", self.gpus.engine)
            await self.serving.go_away("the GPU is training a job, so models are out of its memory")
        elif not away and self._yielded:
            self._yielded = False
            self.serving.come_back()
            if self._first is not None:
                self._background.append(asyncio.create_task(self._load_first(self._first), name="first-model"))

    async def _load_first(self, model: Model) -> None:
        try:
            await self.serving.load(model)
        except GymError as error:
            logger.error("%s cannot be served: %s", model.id, error)

    def _check_bind(self, hosts: Iterable[str], environment_keys: Iterable[Key]) -> None:
        host = next((host for host in hosts if not is_loopback(host)), None)
        if host is None:
            return
        made = [key for key in self.database.write_now(list_keys) if key.revoked_at is None and key.name != "local"]
        if not made and not list(environment_keys):
            raise UserError(
                f"{host} can be reached from outside, and no key was made for that",
                hint="set GYM_API_KEY and GYM_ADMIN_KEY, or make keys while it listens on 127.0.0.1: gym keys create",
            )
        if not self.settings.server.tls_certificate:
            logger.warning("%s without TLS: keys and texts can be read on the way; set server.tls_certificate", host)

    def _info(self) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse(
            version=version("gym-serve"),
            spec_version=SPEC_VERSION,
            can_train=self.jobs.can_train,
            engine=self.settings.engine.kind,
            num_gpus=self.num_gpus,
            max_file_bytes=self.settings.limits.max_file_bytes,
            max_chunk_bytes=convert.MAX_CHUNK_BYTES,
            http_url=self.http_url,
        )

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        stats = self.serving.stats()
        yield "gym_open_streams", "Answers and event streams that are open.", self.streams.num_open
        yield "gym_engine_running", "Answers that are being generated.", stats.num_running
        yield "gym_engine_waiting", "Requests that wait for their turn in an engine.", stats.num_waiting
        yield "gym_kv_used_tokens", "Positions in use of the key-value cache.", stats.kv_used_tokens
        yield "gym_kv_capacity_tokens", "Positions of the key-value cache.", stats.kv_capacity_tokens
        yield "gym_prompt_tokens_reused", "Prompt tokens that need not be read again.", stats.num_reused_tokens
        yield "gym_engine_restarts", "Times an engine died and was started anew.", self.serving.num_restarts
        yield "gym_jobs_running", "Jobs with processes.", self.runner.num_running
        yield "gym_jobs_queued", "Jobs that wait.", self.runner.num_queued
        yield "gym_gpus", "GPUs that jobs may use.", self.num_gpus
        yield "gym_gpus_held", "GPUs that jobs hold.", self.runner.num_gpus_held


async def run(settings: Settings) -> None:
    """Runs a daemon until SIGTERM or SIGINT."""
    daemon = Daemon(settings)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await daemon.start()
    await stopped.wait()
    await daemon.stop()


class _HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own: the daemon decides when everything ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _launcher(settings: Settings) -> Launcher:
    jobs = settings.jobs
    if jobs.launcher == "slurm":
        return SlurmLauncher(jobs.slurm_options, settle_s=jobs.slurm_settle_s)
    return LocalLauncher()


def _take(data_dir: Path) -> IO[str]:
    """A lock on the data directory, which is made where it is not there; held for as long as the process lives."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (data_dir / "daemon.lock").open("w")
    except OSError as error:
        raise UserError(
            f"the data directory cannot be written: {error.strerror}",
            where=Where(file=str(data_dir)),
            hint="--data-dir takes another one",
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OutputInUse(
            "another daemon runs on this data directory",
            where=Where(file=str(data_dir)),
            hint="stop it, or give this one a directory of its own with --data-dir",
        ) from None
    return file


def _certificate(settings: Settings) -> tuple[bytes, bytes] | None:
    server = settings.server
    if not server.tls_certificate:
        return None
    try:
        # Loaded here to find out whether they are a pair, while nothing listens yet.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(server.tls_certificate, server.tls_key)
        return Path(server.tls_certificate).read_bytes(), Path(server.tls_key).read_bytes()
    except ssl.SSLError as error:
        raise UserError(
            f"the TLS certificate and its key cannot be used: {error.reason or error}",
            where=Where(file=server.tls_certificate),
            hint="server.tls_certificate and server.tls_key are PEM files that belong together",
        ) from None
    except OSError as error:
        raise UserError(
            f"the TLS certificate or its key cannot be read: {error.strerror}",
            where=Where(file=str(error.filename or server.tls_certificate)),
        ) from None
