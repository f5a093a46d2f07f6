"""Claims about adaptive loops, and the results that show them or do not."""

from functools import partial

from ..claims import Cell, Claim

_claim = partial(
    Claim, paper="004", recipe="adaptive_small", command="titan-loop train adaptive_small"
)


def _mano(stage: str) -> Cell:
    return Cell(stage=stage, name="mano_capo/mano/acc,none/static:1")


def _facts(stage: str) -> Cell:
    return Cell(stage=stage, name="mano_capo/knowledge/bits/static:1")


CLAIMS = [
    _claim(
        text="arithmetic: loops that each layer decides on, minus no loops",
        theirs="0.476 bits per byte",
        cells=[_mano("loop3"), _mano("plain")],
        at_least=10,
        unit="points",
        note="at 2.4 times the FLOPs; the paper measures mathematical text",
    ),
    _claim(
        text="arithmetic: those loops, minus the layers of equal FLOPs",
        theirs="0.114 bits per byte",
        cells=[_mano("loop3"), _mano("iso_flop")],
        at_least=0,
        unit="points",
        note="the paper measures mathematical text; three seeds more halved the interval, and ran "
        "beside other jobs",
    ),
    _claim(
        text="facts: loops with memory, minus loops alone",
        theirs="0.019 bits per byte",
        cells=[_facts("loop3_memory"), _facts("loop3")],
        at_least=0,
        factor=1.0,
        unit="bits",
        note="memory has twice the parameters and 1.5 times the FLOPs, the paper's 5 % more "
        "parameters; it measures commonsense text; a plain model with equal parameters and 0.6 "
        "times the FLOPs stores 1.2 bits more †; three seeds more ran beside other jobs",
    ),
]
