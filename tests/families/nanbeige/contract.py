"""Cases of Llama's blocks, looped."""

from functools import partial

from tests.contracts.families import Compiled, Contract, Folder, Generated
from tests.distributed.test_parity import HELD, Case
from titan_loop.families.nanbeige.model import NanbeigeOptions
from titan_loop.inference.exit_policy import Confidence

SPLIT = {"n_layers": 3, "prelude_layers": 1, "coda_layers": 1}
case = partial(Case, family=NanbeigeOptions, steps=(3, 1))

CONTRACT = Contract(
    parity={
        "loop": (case(exit_gate=False), "dp2 tp2 cp2"),
        "normed-tied": (
            case(
                tie_weights=True,
                exit_gate=False,
                options=(("norm_placement", "every_step"),),
                checkpointing="selective",
            ),
            "dp2 dp2-tp2",
        ),
        "gated": (case(checkpointing="full", fsdp=HELD), "dp2 tp2-no-sp"),
        "split": (
            case(exit_gate=False, options=tuple(SPLIT.items()), backward_steps=2),
            "dp2 tp2 hsdp2x2",
        ),
    },
    compiled={"one layer": Compiled(NanbeigeOptions(n_layers=1))},
    generated={
        "loop": Generated(NanbeigeOptions(), Confidence(0.05)),
        "norm between": Generated(NanbeigeOptions(norm_placement="every_step"), Confidence(0.05)),
        "prelude and coda": Generated(NanbeigeOptions(**SPLIT), Confidence(0.05)),
    },
    folders={
        "llama-unrolled": Folder(
            "nanbeige",
            [
                {"recurrent_steps": 1},
                {"recurrent_steps": 1, "tie_weights": True, "rope_theta": 500.0},
            ],
        ),
        "nanbeige": Folder(
            "nanbeige",
            [
                {"recurrent_steps": 2, "norm_placement": "every_step"},
                {"recurrent_steps": 4, "norm_eps": 1e-6, "rope_theta": 500.0},
            ],
            own_code=True,
        ),
    },
)
