"""Skipped steps with consequences: recorded in `decisions.jsonl`, and followed by the ladder.

One record a decision:

    decision         skip, rewind, halve or stop
    step             the training step it was taken about
    rewound          rewinds before it
    windows          [first, stop) ranges of global windows: of the step, or those jumped over
    loss, loss_bound, grad_norm, grad_norm_bound      of a skip: what it had, and might have
    began            of a skip: layer and recurrent step where it began, where one stands out
    to_step, manifest_sha256, state     of a rewind: the checkpoint, and what is known after it

A rewind is taken once the checkpoint is loaded. A start that loads the same checkpoint finds the
record and goes on with its state, so a run that is killed after a rewind does not forget it.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.checkpoint.rewinding import go_back
from titan_loop.errors import UnstableError, UserError
from titan_loop.ranks import all_ranks, from_rank_zero
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl
from titan_loop.training.stability.ladder import Decision, Ladder, SkippedStep
from titan_loop.training.stability.spikes import where_it_began
from titan_loop.training.stability.verdict import JudgedStep, SkippedSteps

logger = logging.getLogger(__name__)


class Recovery(SkippedSteps):
    """Skipped steps, spikes and non-finite ones alike, with the ladder behind them.

    Args:
        ladder: Decides.
        looped: Numbers of the layers inside the loop.
        run: The run directory.
        writes: Whether this rank writes the record.

    Attributes:
        ladder: As given.
        decision: What the newest skipped step that was read asks for.
        held_back: Whether the newest step that was read was skipped. Its weights may be the reason,
            so they are not saved.
    """

    def __init__(self, ladder: Ladder, *, looped: range, run: RunDirectory, writes: bool) -> None:
        super().__init__(ladder.skips)
        self.ladder = ladder
        self.decision: Decision = "skip"
        self.held_back = False
        self._looped, self._run, self._writes = looped, run, writes

    def _accept(self) -> None:
        super()._accept()
        self.held_back = False

    def _count(self, judged: JudgedStep) -> None:
        self.held_back = True
        self.total += 1
        windows = judged.windows
        skipped = SkippedStep(judged.step, windows.start, windows.stop)
        found = self._evidence(judged)
        self.decision = self.ladder.note(skipped)
        logger.warning(
            "step %d (windows %d to %d) is a spike: loss %.4g, at most %.4g; gradient norm %.4g, "
            "at most %.4g; update skipped (%d of %d within %d steps)%s",
            judged.step,
            windows.start,
            windows.stop - 1,
            *(found[name] for name in ("loss", "loss_bound", "grad_norm", "grad_norm_bound")),
            len(self.ladder.skipped),
            self.ladder.skips,
            self.ladder.window,
            f"; it began in the {found['began']}" if found["began"] else "",
        )
        self._record("skip", skipped.step, [[windows.start, windows.stop]], **found)
        if self.decision != "skip":
            self._unread.clear()  # steps of weights that are given up

    def go_back(self, checkpointer: LoopCheckpointManager) -> None:
        """Load the last good checkpoint from before the skipped steps, and record it; collective.

        Args:
            checkpointer: Loads the trainer's state, too, the ladder's of then included.

        Raises:
            UnstableError: The ladder is at its end, or there is no such checkpoint.
        """
        ladder, decision, self.decision = self.ladder, self.decision, "skip"
        last, first = ladder.skipped[-1].step, ladder.skipped[0].step
        windows = [list(pair) for pair in ladder.windows()]
        said = (
            f"{len(ladder.skipped)} spikes within {ladder.window} steps, the last at step {last} "
            f"(windows {windows})"
        )
        if decision == "stop":
            self._record("stop", last, windows)
            raise UnstableError(
                f"stopped after {said}: went back {len(ladder.went_to)} times already; look at "
                f"{self._run.decisions_jsonl}, then change the data, the learning rate or the "
                "recurrent steps"
            )
        state = ladder.state_dict()
        step = go_back(checkpointer, before=first, avoid=ladder.went_to)
        if step is None:
            self._record("stop", last, windows)
            raise UnstableError(
                f"stopped after {said}: there is no good checkpoint from before step {first} to go "
                "back to; lower checkpoint.interval"
            )
        ladder.load_state_dict(state)  # loading brought that of then
        parent = checkpointer.parent  # of what was loaded, on every rank
        assert parent is not None
        jump = ladder.go_back(decision, to_step=step, manifest_sha256=parent["manifest_sha256"])
        self.held_back = False
        logger.warning(
            "%s: back to step %d (rewind %d of %d%s), jumping over these windows",
            said,
            step,
            ladder.rewound,
            ladder.rewinds,
            ", half the recurrent steps from now on" if ladder.halved else "",
        )
        self._record(
            decision,
            last,
            windows,
            to_step=step,
            manifest_sha256=jump["manifest_sha256"],
            state=ladder.state_dict(),
        )

    def resume(self, checkpointer: LoopCheckpointManager) -> None:
        """Go on with what is recorded of a rewind to the checkpoint that was loaded; collective."""
        loaded = checkpointer.parent if checkpointer.enable else None
        if loaded is None:
            return

        def look() -> Mapping[str, Any] | None:
            records = self._run.read_decisions()
            back = [r for r in records if r.get("manifest_sha256") == loaded["manifest_sha256"]]
            return back[-1]["state"] if back else None

        state = from_rank_zero(all_ranks(), look)
        if state is not None:
            try:
                self.ladder.load_state_dict(state)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self._run.decisions_jsonl} has a damaged record of the rewind to "
                    f"{loaded['path']} ({error!r}); remove that line to go on without it"
                ) from error
            logger.info("Went back to this checkpoint before: %d jumps", len(self.ladder.jumps))

    def _evidence(self, judged: JudgedStep) -> dict[str, Any]:
        evidence = judged.verdict.evidence
        assert evidence is not None
        (loss, log_norm), (bound, log_bound) = evidence.values.tolist(), evidence.bounds.tolist()
        began = where_it_began(evidence.places, self._looped)
        return {
            "loss": loss,
            "loss_bound": bound,
            "grad_norm": math.exp(min(log_norm, 700.0)) if log_norm == log_norm else math.nan,
            "grad_norm_bound": math.exp(min(log_bound, 700.0)),
            "began": "" if began is None else str(began),
        }

    def _record(self, decision: Decision, step: int, windows: list[list[int]], **more: Any) -> None:
        if self._writes:
            rewound = len(self.ladder.went_to) - (decision in ("rewind", "halve"))
            record = {"decision": decision, "step": step, "rewound": rewound, "windows": windows}
            append_jsonl(self._run.decisions_jsonl, {**record, **more})
