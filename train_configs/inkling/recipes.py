"""Inkling-2-Mini's shape, and its passes in miniature.

    inkling_2_mini      the released text model's shape on data of yours
    inkling_small       two passes with messages, and one pass

`inkling_2_mini` has the sizes of the released config, by the defaults of its class in transformers
5.24; data, window, batch and rates were not published. `inkling_small` reads the quick start's text
and the arithmetic of `physics_exams`, each arm at one rate.
"""

from typing import Any

from titan_loop.data.load.loader import WindowLoader
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.families.inkling.model import InklingOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import run
from ..text_and_mano import TASKS, small_run

CORPUS, WINDOW, WINDOWS = "corpora/inkling", 4_096, 256
TOKENS = 2_000 * WINDOWS * WINDOW
SMALL: dict[str, Any] = {
    "size": "debugmodel",
    "dim": 96,
    "hidden_dim": 64,
    "full_layers": (1, 3, 5),
    "window": 32,
    "bias_extent": 64,
    "message_rank": 6,
}
ARMS = {
    name: InklingOptions(**SMALL, recurrent_steps=passes)
    for name, passes in (("two_passes", 2), ("one_pass", 1))
}
RATE = 5e-3


def inkling_2_mini() -> LoopTrainer.Config:
    """Inkling-2-Mini's text model, three passes through 12 of 24 layers, on your data."""
    model = InklingOptions(
        size="2-mini",
        head_dim=128,
        prelude_layers=6,
        coda_layers=6,
        block_layers=6,
        embedding_rows=201_024,
        experts=128,
        top_k=8,
    )
    config = run(
        model,
        WindowLoader.Config(mixture=[f"{CORPUS}/text=1"]),
        tokens=TOKENS,
        window=WINDOW,
        windows=WINDOWS,
        at_once=1,
        rate=Schedule.warmup_cosine(
            3e-4, warmup_tokens=TOKENS // 20, total_tokens=TOKENS, final=3e-5
        ),
        steps=3,
        held_out=HeldOutConfig(depths=[1, 3]),
        activation_checkpoint=SelectiveAC.Config(),
        save_every=500,
    )
    config.dump_folder = "runs/inkling_2_mini"
    return config


def inkling_small() -> Recipe:
    """Two passes with messages, and one, on text and arithmetic, on one core."""
    stages = [
        Stage(name=f"{arm}_{task}", config=small_run(data, model, RATE, "adamw"))
        for task, data in TASKS.items()
        for arm, model in ARMS.items()
    ]
    return Recipe(name="inkling_small", stages=stages)
