"""Which tasks a run asks its model while it trains; `titan_loop.evaluation.training_suite` does."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """A small suite of offline tasks, asked of the model in training itself.

    Followed by `run_recipe`, through which `titan-loop train` goes: training knows no tasks.
    """

    interval: int = 0
    """Steps between two evaluations; there is one more at the end. 0 turns them off."""

    tasks: list[str] = field(default_factory=lambda: ["held_out", "mano", "multi_hop"])
    """Of held_out, mano, multi_hop and mmlu_dev; `offline` is all of them."""

    depths: list[int] = field(default_factory=lambda: [1, 4])
    """Recurrent steps to read; may exceed the trained R."""

    windows: int = 16
    """Held-out windows per source, the same ones every time."""

    questions: int = 32
    """Of every other task, its first ones; each costs a forward pass per answer of it."""

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do."""
        return self.interval > 0
