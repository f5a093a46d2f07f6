"""Claims about adaptive loops, and the results that show them or do not."""

from ..claims import Cell, Claim

_ADAPTIVE = "titan-loop train adaptive_small"

CLAIMS = [
    Claim(
        paper="004",
        text="arithmetic: loops that each layer decides on, minus no loops",
        theirs="0.476 bits per byte",
        recipe="adaptive_small",
        cells=[
            Cell(stage="loop3", name="mano_capo/mano/acc,none/static:1"),
            Cell(stage="plain", name="mano_capo/mano/acc,none/static:1"),
        ],
        at_least=10,
        unit="points",
        command=_ADAPTIVE,
        note="at 2.4 times the FLOPs; the paper measures mathematical text",
    ),
    Claim(
        paper="004",
        text="arithmetic: those loops, minus the layers of equal FLOPs",
        theirs="0.114 bits per byte",
        recipe="adaptive_small",
        cells=[
            Cell(stage="loop3", name="mano_capo/mano/acc,none/static:1"),
            Cell(stage="iso_flop", name="mano_capo/mano/acc,none/static:1"),
        ],
        at_least=0,
        unit="points",
        command=_ADAPTIVE,
        note="the paper measures mathematical text",
    ),
    Claim(
        paper="004",
        text="facts: loops with memory, minus loops alone",
        theirs="0.019 bits per byte",
        recipe="adaptive_small",
        cells=[
            Cell(stage="loop3_memory", name="mano_capo/knowledge/bits/static:1"),
            Cell(stage="loop3", name="mano_capo/knowledge/bits/static:1"),
        ],
        at_least=0,
        factor=1.0,
        unit="bits",
        command=_ADAPTIVE,
        note="memory has twice the parameters and 1.5 times the FLOPs, the paper's 5 % more "
        "parameters; it measures commonsense text; a plain model with equal parameters and 0.6 "
        "times the FLOPs stores 1.2 bits more †",
    ),
]
