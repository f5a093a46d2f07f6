"""LoopCoder's two loops beside a plain loop and layers that are visited once, in miniature.

    loopcoder_small     LoopCoder, two plain loops and four layers, on text and arithmetic

Every arm has the layers' parameters of two layers (the four are narrower), up to 200 in gates, and
the same tokens. `titan-loop plan loopcoder_small` prints their FLOPs. The text is the quick
start's, the arithmetic the one of `physics_exams`.
"""

from typing import Any

from titan_loop.families.loopcoder.model import LoopCoderOptions
from titan_loop.models.dense import DenseOptions
from titan_loop.models.llama import LlamaOptions
from titan_loop.recipes.recipe import Recipe, Stage

from ..text_and_mano import TASKS, small_run

SHAPE: dict[str, Any] = {"size": "debugmodel", "dim": 96, "n_heads": 3, "n_kv_heads": 3}
TWO: dict[str, Any] = {"n_layers": 2, "hidden_dim": 256, "recurrent_steps": 2}
FOUR: dict[str, Any] = {"n_layers": 4, "hidden_dim": 64, "recurrent_steps": 1}
ARMS: dict[str, LlamaOptions] = {
    "loopcoder": LoopCoderOptions(**SHAPE, **TWO),
    "loop": DenseOptions(**SHAPE, **TWO),
    "dense": DenseOptions(**SHAPE, **FOUR),
}
RATE = 1e-2


def loopcoder_small() -> Recipe:
    """LoopCoder, two plain loops and four layers, on text and arithmetic, on one core."""
    stages = [
        Stage(name=f"{arm}_{task}", config=small_run(data, model, RATE, "muon"))
        for task, data in TASKS.items()
        for arm, model in ARMS.items()
    ]
    return Recipe(name="loopcoder_small", stages=stages)
