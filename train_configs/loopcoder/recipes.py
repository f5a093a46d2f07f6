"""LoopCoder's two loops beside a plain loop and layers that are visited once, in miniature.

    loopcoder_small     LoopCoder, two plain loops and four layers, on text and arithmetic

Every arm has the layers' parameters of two layers (the four are narrower), up to 200 in gates, and
the same tokens. `titan-loop plan loopcoder_small` prints their FLOPs. The text is the quick
start's, the arithmetic the one of `physics_exams`.
"""

from typing import Any

from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.loopcoder.model import LoopCoderOptions
from titan_loop.models.dense import DenseOptions
from titan_loop.models.llama import LlamaOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..physics.exams import MANO
from ..runs import run, text

SHAPE: dict[str, Any] = {"size": "debugmodel", "dim": 96, "n_heads": 3, "n_kv_heads": 3}
TWO: dict[str, Any] = {"n_layers": 2, "hidden_dim": 256, "recurrent_steps": 2}
FOUR: dict[str, Any] = {"n_layers": 4, "hidden_dim": 64, "recurrent_steps": 1}
ARMS: dict[str, LlamaOptions] = {
    "loopcoder": LoopCoderOptions(**SHAPE, **TWO),
    "loop": DenseOptions(**SHAPE, **TWO),
    "dense": DenseOptions(**SHAPE, **FOUR),
}
TASKS: dict[str, tuple[GlobalBatchLoader.Config, int, int, int]] = {
    "text": (text(), 256, 4, 1_500_000),
    "mano": (TaskLoader.Config(task=MANO), 64, 16, 3_600_000),
}
"""Name → data, window, windows of a step, tokens."""
RATE = 1e-2


def loopcoder_small() -> Recipe:
    """LoopCoder, two plain loops and four layers, on text and arithmetic, on one core."""
    stages = [
        Stage(name=f"{arm}_{task}", config=_small(task, model))
        for task in TASKS
        for arm, model in ARMS.items()
    ]
    return Recipe(name="loopcoder_small", stages=stages)


def _small(task: str, model: LlamaOptions) -> LoopTrainer.Config:
    data, window, windows, tokens = TASKS[task]
    steps = model.recurrent_steps
    assert steps is not None
    config = run(
        model,
        data,
        tokens=tokens,
        window=window,
        windows=windows,
        rate=Schedule.warmup_cosine(
            RATE, warmup_tokens=tokens // 20, total_tokens=tokens, final=RATE / 10
        ),
        steps=steps,
        held_out=HeldOutConfig(depths=[steps], windows=128),
        save_every=10_000,
        log_every=50,
    )
    if task == "mano":
        config.suite = SuiteConfig(interval=1_000, tasks=[MANO.name], depths=[steps], questions=500)
        config.adamw.beta2 = 0.98
    config.optimizer.name = "muon"
    return config
