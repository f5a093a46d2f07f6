"""A loader with columns of every kind, and a decoder and an objective that read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_loop.data.columns import Column
from titan_loop.data.load.batches import DataVocabulary, GlobalBatchLoader
from titan_loop.data.load.windows import Window
from titan_loop.families.ouro.model import SIZES
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import Family, FamilyName
from titan_loop.models.loop_config import loop_config
from titan_loop.models.loop_options import LoopOptions
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.streamed_loss import LossBatch, StreamedLoss, token_mean
from titan_loop.plugins import Plugin, register
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

VOCABULARY, SEQ_LEN, WINDOWS = 64, 16, 4
DEPTHS = (1, 2, 1, 3, 2, 1, 2, 1)
"""Recurrent steps that the first windows need; the largest of a step is on one rank only."""

SHIFT = Column(name="shift", reader="model", shape=(2,))
IMPORTANCE = Column(name="importance", reader="loss", dtype="float32")
DEPTH = Column(name="depth", reader="both", per_token=False)


class ToyLoader(GlobalBatchLoader):
    """Windows of random numbers, each a pure function of the window's number."""

    @dataclass(kw_only=True, slots=True)
    class Config(GlobalBatchLoader.Config):
        """No options."""

        def vocabulary(self) -> DataVocabulary:
            return DataVocabulary(VOCABULARY, VOCABULARY - 1)

        def few_labels(self) -> bool:
            return True

        def knows_depth(self) -> bool:
            return True

        def columns(self) -> tuple[Column, ...]:
            return (SHIFT, IMPORTANCE, DEPTH)

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        super().__init__(config, {"toy": "numbers"}, seq_len=seq_len, **split)

    def depth(self, identity: np.ndarray) -> int:
        return DEPTHS[int(identity[2]) % len(DEPTHS)]

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        numbers = np.random.default_rng(int(identity[2]))
        length = len(window.input)
        window.fill(numbers.integers(VOCABULARY, size=length + 1), np.array([5], dtype=np.int64))
        window.columns["shift"][:] = numbers.integers(4, size=(length, 2))
        window.columns["importance"][:] = numbers.random(length)
        window.columns["depth"][...] = self.depth(identity)


class ToyDecoder(LoopDecoder):
    """Reads token ids that two columns move, and reports how far its gate is from 1."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        columns: ClassVar[tuple[str, ...]] = ("shift", "depth")

    def forward(self, tokens: Tensor, *rest: Any, **options: Any) -> LoopOutput:  # pyright: ignore
        columns = options["columns"]
        moved = tokens + columns["shift"].sum(-1) + columns["depth"][:, None]
        output = super().forward(moved % VOCABULARY, *rest, **options)
        return output._replace(aux={"certainty": (output.exit_logit_RBL[-1] - 1).square()})


@dataclass(kw_only=True, slots=True)
class ToyOptions(LoopOptions):
    """The generic options."""

    family: FamilyName = field(default="toy_columns", init=False)


TOY = Family(
    name="toy_columns",
    options=ToyOptions,
    sizes=SIZES,
    decoder_config=partial(loop_config, ToyDecoder.Config),
)
register(Plugin(families={"toy_columns": TOY}))


class ToyLoss(StreamedLoss):
    """Cross entropy of the last step, weighted by two columns, and a little of `aux`."""

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        schedules: ClassVar[tuple[str, ...]] = ("certainty_weight",)
        certainty_weight: Schedule = field(
            default_factory=lambda: Schedule.steps([(0, 0.1), (WINDOWS * SEQ_LEN, 0.2)])
        )
        columns: ClassVar[tuple[str, ...]] = ("importance", "depth")

        def collect(self, *, exit_gate: bool) -> str:
            return "last"

    def set_schedules(self, values: Mapping[str, float]) -> None:
        self.certainty_weight = values["certainty_weight"]

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        return [f"certainty {metrics['certainty']:.3f}"]

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert len(output.hidden_RBLD) == 1
        weight_BL = batch.columns["importance"] * batch.columns["depth"][:, None]
        loss, ce_RBL = readout(
            output.hidden_RBLD,
            labels_BL=batch.labels_BL,
            weight_RBL=weight_BL[None] / batch.valid_tokens,
            rows_T=batch.labelled_T,
        )
        certainty = output.aux["certainty"]
        certainty = certainty.to_local() if isinstance(certainty, DTensor) else certainty
        aux = token_mean(certainty, batch.labels_BL, batch.valid_tokens)
        ce = token_mean(ce_RBL[0], batch.labels_BL, batch.valid_tokens)
        return loss + self.certainty_weight * aux, {"ce": ce, "certainty": aux.detach()}


def toy_run(dump_folder: Path) -> LoopTrainer.Config:
    """Return a run of the toy parts with four windows a step."""
    config = LoopTrainer.Config(
        dump_folder=str(dump_folder),
        total_tokens=3 * WINDOWS * SEQ_LEN,
        model=ToyOptions(size="debugmodel"),
        dataloader=ToyLoader.Config(),
        loss=ToyLoss.Config(),
        learning_rate=Schedule.constant(1e-2),
        recurrence=RecurrenceConfig(steps=Schedule.constant(2), from_data=True, max_steps=4),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(WINDOWS * SEQ_LEN)),
    )
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = 2
    config.training.max_norm = float("inf")
    config.metrics.log_freq = 1
    return config
