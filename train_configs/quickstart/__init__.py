"""The quick start: one looped layer on text, and one on arithmetic; R = 4."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        tasks={"chained_arithmetic": f"{__name__}.chained_arithmetic:ChainedArithmetic"},
    )
)
