"""Rewards on the model's own depth: arithmetic with steps written down, and arms that answer it."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        tasks={"written_arithmetic": f"{__name__}.written_arithmetic:WrittenArithmetic"},
        objectives={"CumulativeLoss": f"{__name__}.cumulative_loss:CumulativeLoss"},
        analyses={
            "answers": Verb(
                f"{__name__}.answers:answers",
                "ask a task's exam of the engine: greedy, at temperature 1, and any of k right",
            ),
        },
    )
)
