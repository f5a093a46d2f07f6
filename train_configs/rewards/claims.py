"""Claims about rewards on the model's own depth, and the results that show them or do not."""

from functools import partial

from ..claims import Cell, Claim


def _greedy(stage: str, exits: str) -> Cell:
    return Cell(stage=stage, name=f"written_arithmetic/greedy/{exits}")


_claim = partial(
    Claim, paper="002", recipe="rewards", command="bash tools/rewards.sh", unit="points"
)
_ON_POLICY = _greedy("exits", "sampled")

CLAIMS = [
    _claim(
        text="rewards with on-policy exits, minus the parent read with the same exits",
        theirs="no gain",
        cells=[_ON_POLICY, _greedy("parent", "sampled")],
        at_least=10,
        note="the paper's model had 1.4B parameters and its exits were not on-policy",
    ),
    _claim(
        text="rewards with on-policy exits, minus the parent at full depth",
        theirs="no gain",
        cells=[_ON_POLICY, _greedy("parent", "full")],
        at_least=10,
        note="the same aim against the parent's better reading",
    ),
    _claim(
        text="rewards with on-policy exits, minus exits found after full-depth answers",
        cells=[_ON_POLICY, _greedy("afterwards", "q:0.5")],
        at_least=5,
        note="the paper's first attempt, each read with its own exits",
    ),
    _claim(
        text="a price on each step and the exit as an action, minus on-policy exits alone",
        cells=[_greedy("priced", "sampled"), _ON_POLICY],
        at_least=-2,
        note="the aim asks for at most 0.7 of the steps as well: see `rewards/README.md`",
    ),
]
