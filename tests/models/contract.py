"""Cases of Llama's blocks, looped."""

from functools import partial

from tests.contracts.families import Compiled, Contract, Folder, Generated
from tests.distributed.test_parity import HELD, Case
from titan_loop.inference.exit_policy import Confidence
from titan_loop.models.dense import DenseOptions

SPLIT = {"n_layers": 3, "prelude_layers": 1, "coda_layers": 1}
case = partial(Case, family=DenseOptions, steps=(3, 1))

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
    compiled={"one layer": Compiled(DenseOptions(n_layers=1))},
    generated={
        "loop": Generated(DenseOptions(), Confidence(0.05)),
        "norm between": Generated(DenseOptions(norm_placement="every_step"), Confidence(0.05)),
        "prelude and coda": Generated(DenseOptions(**SPLIT), Confidence(0.05)),
    },
    folders={
        "llama-unrolled": Folder(
            "nanbeige",
            [
                {"recurrent_steps": 1},
                {"recurrent_steps": 1, "tie_weights": True, "rope_theta": 500.0},
            ],
        ),
    },
)
