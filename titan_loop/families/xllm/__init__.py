"""xLLM-Loop: prelude, recurrent core and coda of Llama's blocks, with injections and H/L states."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.xllm"

register(
    Plugin(
        families={"xllm": f"{_HERE}.model:XLLM"},
        formats={"xllm": f"{_HERE}.formats:XLLM_FOLDER"},
    )
)
