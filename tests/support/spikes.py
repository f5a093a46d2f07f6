"""Spikes made on purpose: windows with wrong labels, and a layer whose weights go bad."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from titan_loop.models.initialisation import local_part
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState


class Spikes(Callback):
    """Spoils windows and a layer; the same on every rank and after every start.

    Args:
        bad_windows: Global windows whose labels are all replaced by the last token.
        poisoned_after: Step after which a layer's weights are multiplied, once; None for never.
    """

    def __init__(
        self,
        bad_windows: Iterable[int] = (),
        *,
        poisoned_after: int | None = None,
        layer: int = 1,
        factor: float = 300.0,
    ) -> None:
        self._bad = [*bad_windows]
        self._poisoned_after = poisoned_after
        self._layer, self._factor = layer, factor

    def on_train_start(self, trainer: TrainingState) -> None:
        """Let the loader fill the bad windows wrongly."""
        loader = trainer.dataloader
        bad = {tuple(row) for row in loader.locate(np.array(self._bad, dtype=np.int64)).tolist()}
        last, fill = trainer.config.dataloader.vocabulary().size - 1, loader.fill_window

        def fill_wrongly(identity: np.ndarray, window: Any) -> None:
            fill(identity, window)
            if tuple(identity.tolist()) in bad:
                window.labels[:] = last

        loader.fill_window = fill_wrongly  # type: ignore[method-assign]

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Poison the layer, unless the run went back for it: a device fails once."""
        after = self._poisoned_after
        decisions = RunDirectory(trainer.config.dump_folder).read_decisions
        if trainer.step != after or any(
            record["decision"] == "rewind" and record["step"] > after for record in decisions()
        ):
            return
        with torch.no_grad():
            for parameter in trainer.model.layers[str(self._layer)].parameters():
                local_part(parameter).mul_(self._factor)
