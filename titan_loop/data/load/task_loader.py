"""Examples of a generated task in windows, read through the same interface as prepared sources."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from titan_loop.data.columns import Column
from titan_loop.data.keyed import keyed_integer
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.batches import DataVocabulary, GlobalBatchLoader
from titan_loop.data.load.windows import Window
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.recorded_task import TASK
from titan_loop.data.tasks.task import Example, Task
from titan_loop.errors import UserError


class TaskLoader(GlobalBatchLoader):
    """Draws a task's examples; window k is a pure function of task, seed and k.

    An example is a document: positions restart with it. Examples fill a window and the last one is
    cut off; or each example has a window to itself, and every position after it is a document of
    its own without a label.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GlobalBatchLoader.Config):
        """The task; the window length and batch sizes come from `training`."""

        seed: int = 0
        """Seed of the examples."""

        # The task's fields are flags themselves: `--dataloader.modulus`.
        task: Annotated[Task, tyro.conf.arg(name="")] = field(default_factory=Mano)

        all_targets: bool = False
        """Train on every label of an example instead of on the answer alone."""

        window: Literal["packed", "example"] = "packed"
        """Fill a window with examples, the last one cut off, or with one example and padding."""

        def vocabulary(self) -> DataVocabulary:
            """Return the task's vocabulary."""
            task = self.task
            return DataVocabulary(task.vocab_size, task.vocab_size - 1, task.model_options)

        def generated_task(self) -> Task:
            """Return the task."""
            return self.task

        def few_labels(self) -> bool:
            """Return whether windows hold one example: padding, and often one answer."""
            return self.window == "example"

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        task = config.task
        whole = [column.name for column in task.columns if not column.per_token]
        if whole and config.window == "packed":
            raise UserError(
                f"dataloader.window=packed: {task.name} has one {' and one '.join(whole)} for a "
                "whole example; set dataloader.window to example"
            )
        if seq_len + 1 < task.longest_example:
            raise UserError(
                f"training.seq_len {seq_len} is too short for {task}: set it to at least "
                f"{task.longest_example - 1}"
            )
        self._config = config
        super().__init__(config, self.describe(config, seq_len), seq_len=seq_len, **split)

    def describe(self, config: Config, seq_len: int) -> dict[str, Any]:
        """Return the settings that decide the examples, as in `GlobalBatchLoader`."""
        parameters = asdict(config.task)
        description: dict[str, Any] = {
            TASK: config.task.name,
            "seed": config.seed,
            **parameters,
            "all_targets": config.all_targets,
            "seq_len": seq_len,
        }
        assert len(description) == len(parameters) + 4, "a parameter has a name of the loader's"
        if config.window != "packed":
            description["window"] = config.window
        return description

    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return (0, last level, window number) of each global window (see the base class)."""
        identity = super().locate(window)
        identity[:, 1] = self._config.task.levels - 1
        return identity

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        all_targets, filled = self._config.all_targets, 0
        clear(window)
        for _, example in self._examples(identity):
            labels = example.labels if all_targets else example.answer_labels()
            filled += place(window, example, labels, self._config.task.columns, start=filled)

    def depth(self, identity: np.ndarray) -> int:
        return max(self._config.task.depth(question) for question, _ in self._examples(identity))

    def _examples(self, identity: np.ndarray) -> Iterator[tuple[Any, Example]]:
        """Yield the questions of a window and their examples, of which the last may be cut off."""
        config, task = self._config, self._config.task
        filled = 0
        _, level, number = identity.tolist()
        key = keyed_integer(f"{task.name} window", config.seed, number)
        for question in task.questions(key, level):
            example = task.encode(question)
            yield question, example
            filled += len(example.tokens)
            if filled >= self._seq_len or config.window == "example":
                break


def clear(window: Window) -> None:
    """Make a window all padding: every position a document of its own, without a label."""
    window.input[:], window.positions[:], window.labels[:] = 0, 0, IGNORED
    for values in window.columns.values():
        values[...] = 0


def place(
    window: Window, example: Example, labels: np.ndarray, columns: Sequence[Column], start: int = 0
) -> int:
    """Write an example into a window, cut off at its end; return the positions written."""
    length = min(len(example.tokens), len(window.input) - start)
    here = slice(start, start + length)
    window.input[here] = example.tokens[:length]
    window.positions[here] = np.arange(length)
    window.labels[here] = labels[:length]
    for column in columns:
        values = example.columns[column.name]
        if column.per_token:
            window.columns[column.name][here] = values[:length]
        else:
            window.columns[column.name][...] = values
    return length
