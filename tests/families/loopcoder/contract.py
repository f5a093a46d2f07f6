"""Cases of LoopCoder."""

from functools import partial
from pathlib import Path

from tests.contracts.families import Compiled, Contract, Folder, Generated, Run
from tests.contracts.runs import BATCH, small_run
from tests.distributed.test_parity import HELD, Case
from titan_loop.families.loopcoder.model import LoopCoderOptions
from titan_loop.inference.exit_policy import Confidence
from titan_loop.planning.rehearsal import LoopTrainer
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule

NEAR = {"loop_window": 5}
case = partial(Case, family=LoopCoderOptions, steps=(2, 1), options=tuple(NEAR.items()))


def run(folder: Path, world: int) -> LoopTrainer.Config:
    """Return a run in which steps 1 to 3 take turns, and the backward pass reaches two of them."""
    config = small_run(folder, LoopCoderOptions(**NEAR), steps=4)
    steps = Schedule.steps([(0, 1), (BATCH, 2), (3 * BATCH, 3)])
    config.recurrence = RecurrenceConfig(steps=steps, backward_steps=2)
    return config


CONTRACT = Contract(
    parity={
        "loop": (case(exit_gate=False), "cp2"),
        "truncated": (
            case(exit_gate=False, backward_steps=1, checkpointing="recurrent-step"),
            "dp2",
        ),
        "held-tied": (
            case(tie_weights=True, exit_gate=False, fsdp=HELD, checkpointing="full"),
            "tp2",
        ),
    },
    compiled={"loop": Compiled(LoopCoderOptions(n_layers=1, **NEAR))},
    generated={"loop": Generated(LoopCoderOptions(**NEAR), Confidence(0.05))},
    runs={"loop": Run(run)},
    folders={
        "loopcoder": Folder(
            "loopcoder",
            [
                {"recurrent_steps": 2},
                {"recurrent_steps": 2, "loop_window": 7, "norm_eps": 1e-6, "rope_theta": 500.0},
            ],
            transformers=None,
            refused=[
                ({"loop_num": 3}, "loop_num=3 is not supported by titan_loop; only 2 can be"),
                ({"loop_window_size": 0}, "loop_window_size=0 must be a positive integer"),
                ({"attention_bias": True}, "attention_bias=True is not supported"),
                ({"is_causal": False}, "is_causal=False is not supported"),
                ({"head_dim": 8}, "head_dim=8 is not supported"),
                ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
                ({"rope_theta": None}, "rope_theta is missing"),
                ({"num_hidden_layers": 1}, "unknown (model.gate_projections.1.bias"),
            ],
            unfit=[
                ({"recurrent_steps": 3}, (), "--recurrent-steps=3: programs that read the"),
                ({}, ("--recurrent-steps", 4), "--recurrent-steps=4: programs that read the"),
                ({"exit_gate": True}, (), "model.exit_gate=True: the LoopCoder format has no"),
                ({"norm_placement": "every_step"}, (), "model.norm_placement=every_step: the Loop"),
            ],
        )
    },
    refused=[
        (LoopCoderOptions(injection="additive"), "model.injection=additive is not in LoopCoder"),
        (LoopCoderOptions(prelude_layers=1), "model.prelude_layers=1 is not in LoopCoder"),
        (LoopCoderOptions(loop_window=0), "model.loop_window=0 must be at least 1"),
    ],
)
