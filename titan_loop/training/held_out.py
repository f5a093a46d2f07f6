"""Held-out loss per source at chosen depths, also deeper than the model was trained.

One forward pass to the largest depth gives the state after every step, so all depths cost one pass.
The loss is read out through the streamed head, which makes no gradients here. Data-parallel ranks
share the windows, and every rank runs the same number of passes, so no collective is left waiting.

A record of `held_out.jsonl`: `step`, `tokens`, and per source and depth r `SOURCE/ce/step_r` (nats
per token) and `SOURCE/bits_per_byte/step_r`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from titan_loop.data.load.loader import (
    HeldOutWindows,
    WindowLoader,
    held_out_windows,
    named_sources,
)
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError
from titan_loop.models.context import WindowShare
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """What to evaluate while training."""

    interval: int = 0
    """Steps between evaluations; there is one more at the end. 0 turns them off."""

    sources: list[str] = field(default_factory=list)
    """Tokenised sources whose held-out split is read; empty takes those of the mixture."""

    depths: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Recurrent steps to score; may exceed the trained R."""

    windows: int = 32
    """Windows per source, the same ones every time."""

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do."""
        return self.interval > 0

    def check_settings(self) -> None:
        """Raise `UserError` for values that cannot work, whatever the data."""
        if self.interval < 0:
            raise UserError(f"held_out.interval={self.interval} is negative; 0 turns it off")
        if self.windows < 1:
            raise UserError(f"held_out.windows={self.windows} must be at least 1")
        if self.enabled and (not self.depths or min(self.depths) < 1):
            raise UserError(f"held_out.depths={self.depths} must name depths of at least 1")

    def check(self, training_sources: Sequence[str], vocab_size: int, seq_len: int) -> None:
        """Raise `UserError` for data that cannot be evaluated on.

        Args:
            training_sources: Prepared sources of the mixture, the default for `sources`.
            vocab_size: Of the model.
            seq_len: L, the tokens predicted in a window.
        """
        if not self.enabled:
            return
        sources = self.sources or training_sources
        if not sources:
            raise UserError(
                f"held_out.interval={self.interval}: this data has no held-out text; set it to 0"
            )
        # As one mixture: that refuses missing sources and another tokenizer than training's.
        once = {os.path.realpath(path): path for path in [*training_sources, *sources]}
        together = [f"{path}=1" for path in once.values()]
        largest = WindowLoader.Config(mixture=together).vocabulary().largest_token
        if largest >= vocab_size:
            raise UserError(
                f"held_out.sources={list(sources)}: the largest token {largest} does not fit "
                f"model.vocab_size={vocab_size}"
            )
        for path in sources:
            split = SourceCard.read(Path(path)).splits.get("held_out")
            if split is None or not split.tokens:
                raise UserError(
                    f"held_out.interval={self.interval}: source {path} holds no document out; "
                    "prepare it with a larger --held-out-fraction, name others with "
                    "--held-out.sources, or set --held-out.interval 0"
                )
            if split.tokens < seq_len + 1:
                raise UserError(
                    f"held_out.interval={self.interval}: source {path} holds out {split.tokens} "
                    f"tokens, less than one window of training.seq_len + 1 = {seq_len + 1}: "
                    "prepare it with a larger --held-out-fraction, name others with "
                    "--held-out.sources, or set --held-out.interval 0"
                )


@torch.no_grad()
def losses_at_depths(
    model: LoopDecoder,
    inputs: Tensor,
    positions: Tensor,
    labels: Tensor,
    depths: list[int],
    share: WindowShare | None = None,
) -> Tensor:
    """Return the cross entropy of every token at every depth from one forward pass.

    Args:
        model: May be distributed; every rank of its mesh calls this together.
        inputs: (B, L) token ids.
        positions: (B, L), restarting per document.
        labels: (B, L); `IGNORE_INDEX` gives 0.
        depths: Recurrent steps, each ≥ 1.
        share: The part of every window this rank computes; None for all of it.

    Returns:
        (len(depths), B, L) nats, fp32; of this rank's tokens.
    """
    masks = None
    if share is not None:
        masks = model.get_attention_masks(positions, share)
        inputs, positions, labels = (
            part[:, share.queries_L] for part in (inputs, positions, labels)
        )
    output = model(inputs, positions, masks, recurrent_steps=max(depths), collect="all")
    states = tuple(output.hidden_RBLD[depth - 1] for depth in depths)
    weight_RBL = torch.zeros(len(depths), *labels.shape, device=labels.device)
    _, ce_RBL = model.lm_head(states, labels_BL=labels, weight_RBL=weight_RBL)
    return ce_RBL


class HeldOutLoss:
    """A `Callback` that scores the held-out split of every source.

    Args:
        config: What to evaluate.
        trainer: Whose model, ranks and window length to use.
    """

    def __init__(self, config: HeldOutConfig, trainer: "LoopTrainer") -> None:
        self.config = config
        sources = config.sources or trainer.config.dataloader.source_paths()
        self.windows: dict[str, HeldOutWindows] = {
            name: held_out_windows(
                source, seq_len=trainer.config.training.seq_len, count=config.windows
            )
            for name, source in named_sources(sources).items()
        }

    def on_train_start(self, trainer: "LoopTrainer") -> None:
        """Do nothing."""

    def on_step_end(self, trainer: "LoopTrainer", metrics: Mapping[str, Any]) -> None:
        """Evaluate every `interval` steps and after the last one."""
        last = trainer.step == trainer.config.training.steps
        if trainer.step % self.config.interval and not last:
            return
        record = {"step": trainer.step, "tokens": trainer.tokens, **self.evaluate(trainer)}
        if dist.get_rank() == 0:
            append_jsonl(RunDirectory(trainer.config.dump_folder).held_out_jsonl, record)
            logger.info("held out, step %d: %s", trainer.step, self._summary(record))

    def on_train_end(self, trainer: "LoopTrainer") -> None:
        """Do nothing."""

    def evaluate(self, trainer: "LoopTrainer") -> dict[str, float]:
        """Return cross entropy and bits per byte of every source and depth; collective."""
        trainer.model.eval()
        record: dict[str, float] = {}
        for name, windows in self.windows.items():
            record.update(self._evaluate_source(trainer, name, windows))
        trainer.model.train()
        return record

    def _evaluate_source(
        self, trainer: "LoopTrainer", name: str, windows: HeldOutWindows
    ) -> dict[str, float]:
        depths = self.config.depths
        nats_R = window_nats(trainer, windows, depths).sum(dim=1)
        tokens = int((windows.labels != IGNORE_INDEX).sum())
        size_bytes = float(windows.label_bytes.sum())
        record: dict[str, float] = {}
        for depth, nats in zip(depths, nats_R.tolist(), strict=True):
            record[f"{name}/ce/step_{depth}"] = nats / tokens
            record[f"{name}/bits_per_byte/step_{depth}"] = nats / math.log(2) / size_bytes
        return record

    def _summary(self, record: Mapping[str, float]) -> str:
        depths = self.config.depths
        return (
            "; ".join(
                f"{name} "
                + " ".join(f"R={d} {record[f'{name}/bits_per_byte/step_{d}']:.3f}" for d in depths)
                for name in self.windows
            )
            + " bits per byte"
        )


def window_nats(trainer: "LoopTrainer", windows: HeldOutWindows, depths: list[int]) -> Tensor:
    """Score windows with the model that is being trained, in evaluation mode; collective.

    Data-parallel ranks share the windows, context-parallel ones each window.

    Args:
        trainer: Whose model and ranks to use.
        windows: W windows of L tokens, the same on every rank. L fits the tensor-parallel degree,
            and is the training window under context parallelism.
        depths: Recurrent steps, each ≥ 1.

    Returns:
        (len(depths), W) float64: summed nats of every window's labels, equal on all ranks.
    """
    mine_W = _windows_of_rank(len(windows.labels), trainer)
    nats_RW = torch.zeros(
        (len(depths), len(windows.labels)), dtype=torch.float64, device=trainer.device
    )
    batch = trainer.config.training.local_batch_size
    for start in range(0, len(mine_W), batch):
        rows = mine_W[start : start + batch]
        there = rows < len(windows.labels)  # the others only keep the ranks together
        rows = rows.clamp(max=len(windows.labels) - 1)
        inputs, positions, labels = (
            part[rows].to(trainer.device)
            for part in (windows.input, windows.positions, windows.labels)
        )
        with trainer.train_context():
            ce_RBL = losses_at_depths(
                trainer.model, inputs, positions, labels, depths, trainer.window_share
            )
        nats_RW[:, rows[there]] = ce_RBL.double().sum(dim=2)[:, there]
    loss_mesh = trainer.parallel_dims.get_optional_mesh("loss")
    return nats_RW if loss_mesh is None else dist_utils.dist_sum_tensor(nats_RW, loss_mesh)


def _windows_of_rank(count: int, trainer: "LoopTrainer") -> Tensor:
    """Return the indices of every dp-th window; all ranks have as many, some beyond the last."""
    degree, rank = 1, 0
    if trainer.parallel_dims.dp_enabled:
        mesh = trainer.parallel_dims.get_mesh("batch")
        degree, rank = mesh.size(), mesh.get_local_rank()
    return torch.arange(rank, -(-count // degree) * degree, degree)
