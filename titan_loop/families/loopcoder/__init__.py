"""LoopCoder: later loops read the first loop's keys globally, and their own in a window."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.loopcoder"

register(
    Plugin(
        families={"loopcoder": f"{_HERE}.model:LOOPCODER"},
        formats={"loopcoder": f"{_HERE}.formats:LOOPCODER_FOLDER"},
        verbs={
            "loopcoder": Verb(f"{_HERE}.from_loop:loopcoder", "a LoopCoder of a trained loop"),
        },
        kv_caches={"window": f"{_HERE}.cache:WindowCache"},
    )
)
