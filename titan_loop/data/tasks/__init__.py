"""Tasks whose examples are generated, and prompts of a file."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        tasks={
            "mano": f"{__name__}.mano:Mano",
            "prompt_file": f"{__name__}.prompt_file:PromptFile",
        }
    )
)
