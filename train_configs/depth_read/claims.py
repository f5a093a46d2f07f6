"""Claims about early steps that can be read, and the results that show them or do not."""

from ..claims import bits_claim, text_cell

_READ = "bash tools/depth_read.sh"

CLAIMS = [
    *(
        bits_claim(
            text=f"text: step {steps} of a loop that can stop at every step, minus {other}",
            recipe="depth_read",
            cells=[text_cell("rank32_distilled_first_quarter", steps), text_cell(stage, steps)],
            at_most=most,
            command=_READ,
            note="the best of 20 settings (here rank 32 and distillation) by seed 1's score on "
            f"this exam, beside one setting; {cost}",
        )
        for steps, stage, other, most, cost in (
            (1, "r1", "a layer trained at R = 1", 0.05, "4.1 times the FLOPs"),
            (2, "r2", "a layer trained at R = 2", 0.05, "2.5 times the FLOPs"),
            (3, "r3", "a layer trained at R = 3", 0.05, "1.8 times the FLOPs"),
            (
                4,
                "last_step",
                "R = 4 trained on the last step's loss alone",
                0.01,
                "1.02 times the FLOPs, and 1.4 times those of a model with a single readout",
            ),
        )
    ),
    bits_claim(
        text="text: price of the exit gate at R = 4, Muon, its loss in the last fifth of training",
        recipe="depth_read",
        cells=[text_cell("late_2e-2", 4), text_cell("last_step_2e-2", 4)],
        at_most=0.01,
        command=f'{_READ} --seeds "4 5 6" late_2e-2 last_step_2e-2',
        note="both at the best rate of the last step's loss; for a reason found on seeds 1 to 3 of "
        "`depth_pays_tuned_again`, whose early losses delay the drop; step 3 stands 0.07 to 0.08 "
        "above step 4; distilled readouts of rank 8 instead 0.056 [-0.101, 0.213]",
    ),
]
