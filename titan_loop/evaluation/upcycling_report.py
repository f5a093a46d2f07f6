"""Held-out loss per recurrent step before and after upcycling, on the same windows.

A model of N layers at R steps and its copy of k·N layers at R/k steps visit equally many layers.
The report compares them, and both models at the same number of steps, with bootstrap intervals of
the paired difference. It is saved as `evals/upcycling-step-N.json` of the new run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.upcycling import looped_layers
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.evaluation.bits_per_byte import paired_difference
from titan_loop.evaluation.intervals import Interval
from titan_loop.evaluation.share_work import rank_device
from titan_loop.evaluation.window_scores import WindowScores, at_depths, score_windows, with_total
from titan_loop.inference.loading import load_checkpoint
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceJump:
    """One source, or all together; losses in nats per token.

    Attributes:
        before: The parent's loss after 1 … R steps; `after` is the new model's.
        same_steps: `after` − `before` at each of these steps, with 95 % intervals.
        same_visits: Loss of the new model after R/k steps minus the parent's after R; None if k
            does not divide R.
    """

    before: list[float]
    after: list[float]
    same_steps: list[Interval]
    same_visits: Interval | None
    windows: int
    n_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcyclingReport:
    """Change of the loss by upcycling, before any training.

    Attributes:
        recurrent_steps: R, the parent's at the end of its training.
        from_layers: N, the parent's looped layers.
        n_layers: k·N.
    """

    step: int
    recurrent_steps: int
    from_layers: int
    n_layers: int
    sources: dict[str, SourceJump]

    def save(self, run_directory: RunDirectory) -> Path:
        """Write `evals/upcycling-step-N.json` and return its path."""
        path = run_directory.evaluations / f"upcycling-step-{self.step}.json"
        write_json(path, asdict(self))
        return path

    def table(self) -> str:
        """Return the losses at every recurrent step, and the jump, of every source as text."""
        lines = []
        before = "1 layer" if self.from_layers == 1 else f"{self.from_layers} layers"
        after = f"{self.n_layers} layers"
        for name, source in self.sources.items():
            size = f"{source.windows} windows, {source.n_tokens:,} tokens"
            lines.append(f"{name}: held-out nats per token, {size}")
            lines.append(f"  step  {before:>11}  {after:>11}   difference")
            rows = zip(source.before, source.after, source.same_steps, strict=True)
            lines.extend(
                f"  {step:4}  {old:11.4f}  {new:11.4f}  {_with_bounds(difference)}"
                for step, (old, new, difference) in enumerate(rows, start=1)
            )
            if source.same_visits is not None:
                halved = self.recurrent_steps * self.from_layers // self.n_layers
                lines.append(
                    f"  R = {self.recurrent_steps} → {halved}, as many layer visits: "
                    f"{source.before[-1]:.4f} → {source.after[halved - 1]:.4f}, jump "
                    f"{_with_bounds(source.same_visits).lstrip()}"
                )
        return "\n".join(lines)


def report_upcycling(
    parent: Path, child: Path, held_out: Mapping[str, HeldOutWindows]
) -> UpcyclingReport:
    """Score both checkpoints at 1 … R steps, with one model in memory at a time."""
    manifests = [read_manifest(checkpoint) for checkpoint in (parent, child)]
    steps = int(manifests[0]["trainer"]["recurrent_steps"])
    depths = [*range(1, steps + 1)]
    before, after = _score(parent, held_out, depths), _score(child, held_out, depths)
    from_layers, n_layers = (
        len(looped_layers(manifest["trainer"]["architecture"])) for manifest in manifests
    )
    copies = n_layers // from_layers
    return UpcyclingReport(
        step=manifests[0]["step"],
        recurrent_steps=steps,
        from_layers=from_layers,
        n_layers=n_layers,
        sources={name: _compare(before[name], after[name], copies=copies) for name in before},
    )


def _score(
    checkpoint: Path, held_out: Mapping[str, HeldOutWindows], depths: Sequence[int]
) -> dict[str, WindowScores]:
    device = rank_device()
    forward = at_depths(load_checkpoint(checkpoint, device=device).model, depths)
    scores = {name: score_windows(part, forward, device=device) for name, part in held_out.items()}
    return with_total(scores)


def _compare(before: WindowScores, after: WindowScores, *, copies: int) -> SourceJump:
    total = int(before.tokens_W.sum())
    old_RW, new_RW = before.nats_PW, after.nats_PW

    def difference(after_W: np.ndarray, before_W: np.ndarray) -> Interval:
        # Bits per byte with 1/ln 2 "bytes" a token are nats per token.
        return paired_difference(after_W, before_W, before.tokens_W / math.log(2))

    steps = len(old_RW)
    return SourceJump(
        before=[float(nats) for nats in old_RW.sum(axis=1) / total],
        after=[float(nats) for nats in new_RW.sum(axis=1) / total],
        same_steps=[difference(*pair) for pair in zip(new_RW, old_RW, strict=True)],
        same_visits=None if steps % copies else difference(new_RW[steps // copies - 1], old_RW[-1]),
        windows=len(before.tokens_W),
        n_tokens=total,
    )


def _with_bounds(interval: Interval) -> str:
    return f"{interval.value:+11.4f}  [{interval.low:+.4f}, {interval.high:+.4f}]"
