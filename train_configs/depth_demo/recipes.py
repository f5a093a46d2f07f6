"""The purpose of looping, on the Mano task: one layer visited once, and visited four times.

Both runs have the same single layer and read the same data; the looped one also has an exit gate.
The exam asks for the values of held-out prefix expressions of the largest length. Every answer
needs a chain of dependent operations, for which one visit is too shallow.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6, Appendix B.2, scaled down.
"""

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import by_steps, cosine, recipe_of, run

TOTAL_TOKENS = 4_000_000

TABLES = {
    "depth_demo": [
        ResultTable(
            name="accuracy",
            title="% right",
            rows={"looped": {"stage": "looped"}, "not looped": {"stage": "not_looped"}},
            columns=by_steps((1, 2, 4, 6)),
            everywhere={"task": "mano", "metric": "acc,none"},
        )
    ]
}


def depth_demo() -> Recipe:
    """Why loop: modular arithmetic by the same layer four times, and once."""
    return recipe_of("depth_demo", {"looped": _run(4), "not_looped": _run(1)})


def _run(steps: int) -> LoopTrainer.Config:
    looped = steps > 1
    return run(
        OuroOptions(size="debugmodel", n_layers=1, recurrent_steps=steps, exit_gate=looped),
        TaskLoader.Config(task=Mano(modulus=5, max_operations=3)),
        tokens=TOTAL_TOKENS,
        window=64,
        windows=16,
        rate=cosine(4e-3, TOTAL_TOKENS, start=4e-4, warmup=200_000),
        steps=steps,
        entropy_weight=Schedule.constant(0.05),
        adamw=AdamWConfig(beta2=0.98, eps=1e-6),
        suite=SuiteConfig(
            interval=500, tasks=["mano"], depths=[1, 2, 4, 6] if looped else [1], questions=512
        ),
        save_every=1000,
        log_every=100,
    )
