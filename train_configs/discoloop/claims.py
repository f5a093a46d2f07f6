"""Claims about DiscoLoop, and the results that show them or do not."""

from functools import partial

from ..claims import Cell, Claim


def _two_hop(stage: str, split: str, metric: str = "acc,none/static:2") -> Cell:
    return Cell(stage=stage, name=f"two_graph/{split}/{metric}")


_claim = partial(Claim, paper="000", command="titan-loop train two_hop_small")
_RATIO = "one graph; inferred ratio 7.5, the paper's 2"

CLAIMS = [
    *(
        _claim(
            text=f"DiscoLoop minus the plain loop, two hops OOD, {training}",
            theirs="91.7 points",
            recipe=recipe,
            cells=[_two_hop("discoloop", "ood_2"), _two_hop("plain", "ood_2")],
            at_least=40,
            unit="points",
            note=f"{_RATIO}; 1.07 times the FLOPs",
        )
        for recipe, training in (
            ("two_hop_small", "first training"),
            ("two_hop_small_bridge", "second training"),
        )
    ),
    _claim(
        text="the plain loop, half of its state replaced by the bridge's embedding, OOD",
        theirs="100",
        recipe="two_hop_small",
        cells=[_two_hop("plain", "ood_2", "intervention/alpha:0.5")],
        at_least=18,
        note=f"{_RATIO}; the aim is below a fifth of the paper's number; with all of the state "
        "replaced 77.2 [39.7, 100.0]",
    ),
    _claim(
        text="untied copies of the layer, OOD",
        theirs="0",
        recipe="two_hop_small",
        cells=[_two_hop("untied", "ood_2", "acc,none/static:1")],
        at_most=5,
        note=f"{_RATIO}; in distribution 99.6 to 100 %",
    ),
    _claim(
        text="DiscoLoop, three hops OOD, after the three steps of training",
        theirs="65",
        recipe="three_hop_small",
        cells=[_two_hop("discoloop", "ood_3", "acc,none/static:3")],
        at_least=40,
        command="titan-loop train three_hop_small",
        note="46.7 [36.7, 56.7] after six steps",
    ),
    _claim(
        text="DiscoLoop with the gate's loss of every step, the same questions",
        theirs="65",
        recipe="three_hop_small",
        cells=[_two_hop("discoloop_gate", "ood_3", "acc,none/static:3")],
        at_least=40,
        command="titan-loop train three_hop_small",
        note="entropy weight 1, chosen on seed 1; facts then stay in the first step; 79.6 [63.3, "
        "95.9] after six steps; beside other jobs",
    ),
]
