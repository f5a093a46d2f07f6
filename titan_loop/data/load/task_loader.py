"""Mano examples packed into windows, read through the same interface as prepared sources."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.load.batches import DataVocabulary
from titan_loop.data.load.global_windows import GlobalWindowLoader
from titan_loop.data.load.windows import Window
from titan_loop.data.tasks.mano import NAME, Mano, training_questions
from titan_loop.data.tasks.task import TASK
from titan_loop.errors import UserError


class TaskLoader(GlobalWindowLoader):
    """Packs Mano examples into windows; window k is a pure function of the seed and k.

    An example is a document: positions restart at `<bos>`. The last example of a window is cut off
    where the window ends, instead of padding.

    Raises:
        UserError: For a modulus or a length out of range, or a window shorter than the longest
            example.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GlobalWindowLoader.Config):
        """The task; the window length and batch sizes come from `training`."""

        seed: int = 0
        """Chooses the examples."""

        modulus: int = 23
        """Values are 0..modulus-1."""

        max_operations: int = 10
        """Examples have 1..max_operations operations, equally often."""

        all_targets: bool = False
        """Train on every token within an example instead of on the answer alone."""

        def vocabulary(self) -> DataVocabulary:
            """Return the task's vocabulary.

            Raises:
                UserError: For a modulus or a length out of range.
            """
            size = self.task().vocab_size
            return DataVocabulary(size, size - 1)

        def source_paths(self) -> list[str]:
            """Return nothing: the task is generated."""
            return []

        def task(self) -> Mano:
            """Return the task.

            Raises:
                UserError: For a modulus or a length out of range.
            """
            return Mano(self.modulus, self.max_operations)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: Any = None,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        # `tokenizer` and `snapshot_every_n_steps` are torchtitan's: examples are drawn as token
        # ids.
        if config.dataset or config.dataset_path:
            raise UserError(
                "dataloader.dataset and dataset_path have no effect on Mano: leave them out"
            )
        self._task = config.task()
        if seq_len + 1 < self._task.longest_example:
            raise UserError(
                f"training.seq_len {seq_len} is too short for {config.max_operations} operations: "
                f"set it to at least {self._task.longest_example - 1}"
            )
        self._config = config
        super().__init__(
            config,
            {
                TASK: NAME,
                "seed": config.seed,
                "modulus": config.modulus,
                "max_operations": config.max_operations,
                "all_targets": config.all_targets,
                "seq_len": seq_len,
            },
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            local_batch_size=local_batch_size,
            seq_len=seq_len,
        )

    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return (0, 0, window number) of each global window (see the base class)."""
        identity = np.zeros((len(window), 3), dtype=np.uint64)
        identity[:, 2] = window
        return identity

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Draw the examples of the window with this identity."""
        config, size = self._config, self._seq_len + 1
        ids: list[int] = []
        ends: list[int] = []
        answers: list[int] = []
        key = keyed_integer("mano window", config.seed, int(identity[2]))
        for question in training_questions(key, config.max_operations, config.modulus):
            ids += self._task.encode(question)
            answers.append(len(ids))
            ids.append(self._task.value(question.answer))
            ends.append(len(ids))
            if len(ids) >= size:
                break
        mask = np.full(len(ids), config.all_targets)
        mask[answers] = True
        inside = [end for end in ends if end <= size]
        window.fill(np.asarray(ids[:size]), np.asarray(inside, dtype=np.int64), mask[:size])
