"""What Prometheus reads at `/metrics`. Labels never hold a key, a user's text or anything else without bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """One daemon's numbers, in a registry of its own."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        self.requests: Counter = Counter(
            "gym_requests",
            "Calls by interface (http, grpc), route or method, and status.",
            ("interface", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds: Histogram = Histogram(
            "gym_request_seconds",
            "Time from a call's arrival to the end of its answer.",
            ("interface", "route"),
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.prompt_tokens: Counter = Counter("gym_prompt_tokens", "Token ids read in prompts.", registry=self.registry)
        self.generated_tokens: Counter = Counter("gym_generated_tokens", "Token ids generated.", registry=self.registry)
        self.first_token_seconds: Histogram = Histogram(
            "gym_time_to_first_token_seconds",
            "Time from a generation request's arrival to its first token.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.token_seconds: Histogram = Histogram(
            "gym_time_per_output_token_seconds",
            "Time between two tokens of an answer, averaged over the answer.",
            buckets=_TOKEN_S,
            registry=self.registry,
        )
        self.aborted: Counter = Counter(
            "gym_aborted_generations", "Answers that ended because their client went away.", registry=self.registry
        )
        self.job_ends: Counter = Counter(
            "gym_jobs_ended", "Jobs by the state they ended in.", ("state",), registry=self.registry
        )

    def add_gauges(self, read: Callable[[], Iterable[tuple[str, str, float]]]) -> None:
        """Values that are looked up when they are asked for, as (name, description, value)."""

        class Gauges(Collector):
            def collect(self) -> Iterable[GaugeMetricFamily]:
                for name, description, value in read():
                    yield GaugeMetricFamily(name, description, value=value)

        self.registry.register(Gauges())

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
