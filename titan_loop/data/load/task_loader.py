"""Examples of a generated task in windows, read through the same interface as prepared sources."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.batches import DataVocabulary
from titan_loop.data.load.global_windows import GlobalWindowLoader
from titan_loop.data.load.windows import Window
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.registry import TASK
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError


class TaskLoader(GlobalWindowLoader):
    """Draws a task's examples; window k is a pure function of task, seed and k.

    An example is a document: positions restart with it. Examples stand one after another and the
    last of a window is cut off where the window ends, so that nothing is padding; or, for models
    that have to see whole examples, each has a window to itself, and every position behind it is a
    document of its own without a label.

    Raises:
        UserError: For a parameter out of range, or a window shorter than the longest example.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GlobalWindowLoader.Config):
        """The task; the window length and batch sizes come from `training`."""

        seed: int = 0
        """Chooses the examples."""

        # The flags are those of the task: `--dataloader.modulus`.
        task: Annotated[Task, tyro.conf.arg(name="")] = field(default_factory=Mano)

        all_targets: bool = False
        """Train on every label of an example instead of on the answer alone."""

        window: Literal["packed", "example"] = "packed"
        """Fill a window with examples, the last one cut off, or with one example and padding."""

        def vocabulary(self) -> DataVocabulary:
            """Return the task's vocabulary."""
            return DataVocabulary(self.task.vocab_size, self.task.vocab_size - 1)

        def source_paths(self) -> list[str]:
            """Return nothing: the task is generated."""
            return []

        def generated_task(self) -> Task:
            """Return the task."""
            return self.task

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        task = config.task
        if config.dataset or config.dataset_path:
            raise UserError(
                f"dataloader.dataset and dataset_path have no effect on {task.name}: leave them out"
            )
        if seq_len + 1 < task.longest_example:
            raise UserError(
                f"training.seq_len {seq_len} is too short for {task}: set it to at least "
                f"{task.longest_example - 1}"
            )
        self._config = config
        description = {
            TASK: task.name,
            "seed": config.seed,
            **asdict(task),
            "all_targets": config.all_targets,
            "seq_len": seq_len,
        }
        if config.window != "packed":
            description["window"] = config.window
        super().__init__(config, description, seq_len=seq_len, **split)

    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return (0, level, window number) of each global window (see the base class)."""
        identity = np.zeros((len(window), 3), dtype=np.uint64)
        identity[:, 1], identity[:, 2] = self._config.task.levels - 1, window
        return identity

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Draw the examples of the window with this identity."""
        config, task = self._config, self._config.task
        window.input[:], window.positions[:], window.labels[:] = 0, 0, IGNORED
        filled = 0
        _, level, number = identity.tolist()
        key = keyed_integer(f"{task.name} window", config.seed, number)
        for question in task.questions(key, level):
            example = task.encode(question)
            length = min(len(example.tokens), self._seq_len - filled)
            here = slice(filled, filled + length)
            labels = example.labels if config.all_targets else example.answer_labels()
            window.input[here] = example.tokens[:length]
            window.positions[here] = np.arange(length)
            window.labels[here] = labels[:length]
            filled += length
            if filled == self._seq_len or config.window == "example":
                break
