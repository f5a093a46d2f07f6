"""xLLM-Loop: prelude, recurrent core and coda of Llama's blocks, with injections and H/L states."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.xllm"

register(
    Plugin(
        families={"xllm": f"{_HERE}.model:XLLM"},
        objectives={"StudentLoss": f"{_HERE}.student_loss:StudentLoss"},
        formats={"xllm": f"{_HERE}.formats:XLLM_FOLDER"},
        analyses={
            "learned-depths": Verb(
                f"{_HERE}.analysis:learned_depths",
                "show the course of a learned distribution of depths",
            ),
        },
    )
)
