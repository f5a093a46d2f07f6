"""Counters of a server in Prometheus' format, in a registry of its own."""

from typing import Any

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
        self._registry = CollectorRegistry()

        def made(kind: type[Any], name: str, about: str, *labels: str) -> Any:
            return kind(f"titan_loop_{name}", about, labels, registry=self._registry)

        self.prompt_tokens = made(Counter, "prompt_tokens", "Tokens of prompts that ran")
        self.tokens = made(Counter, "tokens", "Tokens generated")
        self.steps = made(Counter, "exit_steps", "Sum of the tokens' exit steps")
        self.answers = made(Counter, "answers", "Answers by how they ended", "ended")
        self.rows = made(Gauge, "rows", "Rows that run")
        self.queue = made(Gauge, "queue", "Rows that wait for a place")
        self.mean_step = made(Gauge, "mean_exit_step", "Mean exit step of all tokens so far")
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
