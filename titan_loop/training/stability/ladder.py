"""What follows a skipped step: nothing yet, a rewind, half the recurrent steps, or the end.

    skip ─► fewer than `skips` within `window` steps: go on
         ─► else, up to `rewinds` times: back to the last good checkpoint, over the windows recorded
         ─► else, once and if asked for: the same with half the recurrent steps from then on
         ─► else: `UnstableError`

A pure function of the steps that were skipped, which all ranks agree on, so they decide alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Decision = Literal["skip", "rewind", "halve", "stop"]


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step whose update was left out.

    Attributes:
        step: Number of the training step.
        first_window: First of the global windows that it read.
        stop_window: The window after the last.
    """

    step: int
    first_window: int
    stop_window: int


@dataclass(slots=True)
class Ladder:
    """Counts skipped steps and says what to do; its fields other than the limits are the state.

    Attributes:
        window: Steps within which skipped ones count together.
        skips: Skipped steps that the run goes back for.
        rewinds: How often it goes back at most.
        halve: Whether it then goes on with half the recurrent steps.
        skipped: Skipped steps since the last rewind that still count.
        rewound: Rewinds so far.
        went_to: Steps of the checkpoints that were gone back to.
        halved: Whether the recurrent steps are halved.
        jumps: A record of every rewind, for the lineage.
    """

    window: int
    skips: int
    rewinds: int
    halve: bool = False
    skipped: list[SkippedStep] = field(default_factory=list)
    rewound: int = 0
    went_to: list[int] = field(default_factory=list)
    halved: bool = False
    jumps: list[dict[str, Any]] = field(default_factory=list)

    def note(self, step: SkippedStep) -> Decision:
        """Count a skipped step; return what to do."""
        self.skipped = [s for s in self.skipped if s.step > step.step - self.window] + [step]
        if len(self.skipped) < self.skips:
            return "skip"
        if self.rewound < self.rewinds:
            return "rewind"
        return "halve" if self.halve and not self.halved else "stop"

    def windows(self) -> list[tuple[int, int]]:
        """Return the recorded windows as ranges (first, stop), joined where they touch."""
        ranges: list[tuple[int, int]] = []
        for step in sorted(self.skipped, key=lambda step: step.first_window):
            if ranges and step.first_window <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(ranges[-1][1], step.stop_window)
            else:
                ranges.append((step.first_window, step.stop_window))
        return ranges

    def go_back(self, decision: Decision, *, to_step: int, manifest_sha256: str) -> dict[str, Any]:
        """Count a rewind; return its record, which `jumps` has from now on."""
        jump = {
            "decision": decision,
            "steps": [step.step for step in self.skipped],
            "windows": [list(pair) for pair in self.windows()],
            "to_step": to_step,
            "manifest_sha256": manifest_sha256,
        }
        self.jumps.append(jump)
        self.went_to.append(to_step)
        if decision == "halve":
            self.halved = True
        else:
            self.rewound += 1
        self.skipped = []
        return jump

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "skipped": [asdict(step) for step in self.skipped],
            "rewound": self.rewound,
            "went_to": self.went_to,
            "halved": self.halved,
            "jumps": self.jumps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        self.skipped = [SkippedStep(**step) for step in state["skipped"]]
        self.rewound, self.went_to = state["rewound"], [*state["went_to"]]
        self.halved, self.jumps = state["halved"], [*state["jumps"]]


def jumped_windows(jumps: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return all windows that the recorded rewinds jumped over, as ranges (first, stop)."""
    return sorted((first, stop) for jump in jumps for first, stop in jump["windows"])
