"""Retrofit: a dense model that exists becomes one that loops."""

from titan_loop.plugins import Plugin, Verb, register

_PLACE = "titan_loop.families.retrofit"

register(
    Plugin(
        families={"retrofit": f"{_PLACE}.model:RETROFIT"},
        formats={
            "retrofit": f"{_PLACE}.formats:LOOPED",
            "retrofit-unrolled": f"{_PLACE}.formats:UNROLLED",
        },
        objectives={"DistillationLoss": f"{_PLACE}.distillation:DistillationLoss"},
        verbs={
            "retrofit": Verb(
                f"{_PLACE}.command:retrofit", "loop layers of a dense model that exists"
            ),
        },
    )
)
