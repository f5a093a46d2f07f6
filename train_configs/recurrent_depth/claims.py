"""Claims about recurrent depth, and the results that show them or do not."""

from functools import partial

from ..claims import Cell, Claim

_ood_claim = partial(
    Claim, paper="001", recipe="recurrent_depth_ood", command="titan-loop train recurrent_depth_ood"
)
_deep_claim = partial(
    Claim,
    paper="001",
    theirs="up to 24 hops after 16",
    recipe="recurrent_depth_small",
    at_least=15,
    unit="points",
    command="titan-loop train recurrent_depth_small",
)
_ASKED = "169 questions of one graph; length and decay were chosen on another one for R = 1 and 4"


def _ood(stage: str, steps: int) -> Cell:
    return Cell(stage=stage, name=f"two_hop_systematic/ood_2/acc,none/static:{steps}")


def _ten_hops(stage: str, steps: int) -> Cell:
    return Cell(stage=stage, name=f"permutation_hops/10_hops/acc,none/static:{steps}")


CLAIMS = [
    _ood_claim(
        text="R = 4, facts never combined in training",
        theirs="above 50",
        cells=[_ood("r4", 4)],
        at_least=50,
        note=f"{_ASKED}; seeds 5 and 6 ran beside other jobs",
    ),
    _ood_claim(
        text="R = 1, the same questions",
        theirs="0",
        cells=[_ood("r1", 1)],
        at_most=5,
        note=f"{_ASKED}; in distribution 98.7 to 100 %",
    ),
    _ood_claim(
        text="R = 4 minus eight layers, the same questions",
        cells=[_ood("r4", 4), _ood("layers8", 1)],
        at_least=20,
        unit="points",
        note="training FLOPs nearly equal; eight layers take R = 4's settings; the aim was set "
        "while the runs were going on",
    ),
    _deep_claim(
        text="10 hops, two beyond training: r = 6 minus the trained R = 4",
        cells=[_ten_hops("depth_r4", 6), _ten_hops("depth_r4", 4)],
        note="trained on up to 8 hops; the aim was set for R = 8",
    ),
    _deep_claim(
        text="10 hops, two beyond training: r = 12 minus the trained R = 8",
        cells=[_ten_hops("depth_r8", 12), _ten_hops("depth_r8", 8)],
        note="two models reach the level of 8 hops (and answer 62 and 71 % of 7 hops), the third "
        "stops at 7 and collapses; an older recipe gained 78.9 points "
        "(`recurrent_depth_small_old`)",
    ),
    _deep_claim(
        text="the same at half the rate, 8 hops at most in training",
        cells=[_ten_hops("depth_r8_half_rate", 12), _ten_hops("depth_r8_half_rate", 8)],
        note="the rate was chosen on seed 3, which is not among these; beside other jobs",
    ),
]
