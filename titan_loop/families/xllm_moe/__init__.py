"""xLLM-Loop's mixtures of experts: the loop of `xllm`, the layers of `moe`; it goes with either."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.xllm_moe"

register(
    Plugin(
        families={"xllm_moe": f"{_HERE}.model:XLLM_MOE"},
        formats={"xllm-moe": f"{_HERE}.formats:XLLM_MOE_FOLDER"},
    )
)
