"""Counters of a server in Prometheus' format, in a registry of its own."""

from prometheus_client import (  # pyright: ignore[reportMissingImports]
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)


class Metrics:
    """Counts of a scheduler, all of them written by its threads.

    Attributes:
        answers: Answers by how they ended: stop, length, time, gone (nobody read it), stopping or
            failure; and refused, which never began.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "titan_loop_"
        self.prompt_tokens = Counter(
            f"{prefix}prompt_tokens", "Tokens of prompts that ran", registry=registry
        )
        self.tokens = Counter(f"{prefix}tokens", "Tokens generated", registry=registry)
        self.steps = Counter(
            f"{prefix}exit_steps", "Sum of the generated tokens' exit steps", registry=registry
        )
        self.answers = Counter(
            f"{prefix}answers", "Answers by how they ended", ["ended"], registry=registry
        )
        self.rows = Gauge(f"{prefix}rows", "Rows that run", registry=registry)
        self.queue = Gauge(f"{prefix}queue", "Rows that wait for a place", registry=registry)
        self.mean_step = Gauge(
            f"{prefix}mean_exit_step", "Mean exit step of all tokens so far", registry=registry
        )
        self._sum = self._count = 0

    def add_token(self, step: int) -> None:
        """Count a token that left after a step."""
        self._sum, self._count = self._sum + step, self._count + 1
        self.tokens.inc()
        self.steps.inc(step)
        self.mean_step.set(self._sum / self._count)

    def text(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self._registry)
