"""Claims about HRM-Text, and the results that show them or do not."""

from ..claims import Claim, mano_cell

CLAIMS = [
    Claim(
        text="Mano: two layers looped, minus them visited once on four times the tokens, equal "
        "FLOPs",
        recipe="hrm_small",
        cells=[mano_cell("loop_flops_mano", 4), mano_cell("plain_flops_mano", 1)],
        at_least=0,
        unit="points",
        command="titan-loop train hrm_small",
        note="modulo 5, questions with operands swapped are in training; HRM-Text's study, whose "
        "two stacks answer 53 at that cost",
    ),
]
