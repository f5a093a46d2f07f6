"""Inkling's passes and LoopCoder's two loops beside a plain loop and dense layers, on one core.

| arm | model |
|---|---|
| `loop` | two of Llama's layers, visited twice |
| `loopcoder` | the same, whose second visit reads the first one's keys and values |
| `dense` | four such layers: the FLOPs of `loop`, twice its layers' parameters |
| `messages` | Inkling: a layer, and two visited again from the same state, with messages |
| `alone` | the same without messages; its second pass would repeat the first, so it has one |

Inkling's blocks are as near Llama's as its options allow: one tap, whole windows, two experts that
every token visits. The feed-forward's width gives all arms but `dense` as many parameters within
2 %; the gates of `alone` are idle, and not counted. Arithmetic is modulo 2, which 150 steps of this
size begin to learn. `bash tools/shipped_loops.sh` trains seed 0 at all rates and seeds 1, 2 and 3
at each arm's best one.
"""

from pathlib import Path
from typing import Any

from titan_loop.analysis.results import ResultTable, RunResult, Where
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.inkling.model import InklingOptions
from titan_loop.families.loopcoder.model import LoopCoderOptions
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import ModelOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.trainer import LoopTrainer

from ..physics.commuted_mano import CommutedMano
from ..runs import SOURCES, at, bits_table, by_source, text
from ..text_and_mano import Data, small_run

MANO = CommutedMano(modulus=2, max_operations=5)
EXAM, TUNING_EXAM = MANO.strata
TASKS = {
    "text": Data(text(), 128, 4, 200 * 512),
    "mano": Data(TaskLoader.Config(task=MANO), 64, 8, 150 * 512),
}
SHAPE: dict[str, Any] = {"size": "debugmodel", "dim": 64, "n_heads": 4, "n_kv_heads": 4}
TWO: dict[str, Any] = {**SHAPE, "n_layers": 2, "hidden_dim": 256, "recurrent_steps": 2}
INKLING: dict[str, Any] = {
    **SHAPE,
    "n_layers": 3,
    "head_dim": 16,
    "prelude_layers": 1,
    "coda_layers": 0,
    "block_layers": 1,
    "full_layers": (),
    "window": 128,
    "bias_width": 4,
    "taps": 1,
    "message_rank": 4,
    "experts": 2,
    "top_k": 2,
    "score_scale": 2.0,
}
ARMS: dict[str, ModelOptions] = {
    "loop": DenseOptions(**TWO),
    "loopcoder": LoopCoderOptions(**TWO),
    "dense": DenseOptions(**{**TWO, "n_layers": 4, "recurrent_steps": 1}),
    "messages": InklingOptions(**INKLING, hidden_dim=48, recurrent_steps=2),
    "alone": InklingOptions(**INKLING, hidden_dim=56, recurrent_steps=1),
}
RATES = {"5e-3": 5e-3, "1e-2": 1e-2, "2e-2": 2e-2, "4e-2": 4e-2}
"""Name → largest learning rate of Muon; neighbours are a factor of 2 apart."""
TUNING_SEED, SEEDS = 0, (1, 2, 3)
TUNING = Path(__file__).parent / "results" / "tuning"
"""Folder of the results of the tuning seed, which is in no table."""

BEST = {
    "loop": {"text": "2e-2", "mano": "2e-2"},
    "loopcoder": {"text": "2e-2", "mano": "2e-2"},
    "dense": {"text": "2e-2", "mano": "2e-2"},
    "messages": {"text": "1e-2", "mano": "5e-3"},
    "alone": {"text": "2e-2", "mano": "1e-2"},
}
"""Arm → task → its best rate by `chosen`."""


def _rows(task: str) -> dict[str, Where]:
    return {
        arm: at(f"{arm}_{task}_{BEST[arm][task]}", model.recurrent_steps or 1)
        for arm, model in ARMS.items()
    }


TABLES = {
    "shipped_loops": [
        bits_table(
            "text",
            "held-out bits per byte, each arm at its best rate",
            _rows("text"),
            by_source((*SOURCES, "all")),
            less="loop",
        ),
        ResultTable(
            name="mano",
            title="% right of five operations, each arm at its best rate",
            rows=_rows("mano"),
            columns={"mano": {"stratum": EXAM}},
            everywhere={"task": MANO.name, "metric": "acc,none"},
            less="loop",
        ),
    ]
}


def shipped_loops() -> Recipe:
    """Inkling's passes with messages and without, LoopCoder, a plain loop and dense layers."""
    stages = [
        Stage(name=f"{arm}_{task}_{label}", config=_arm(data, model, rate))
        for task, data in TASKS.items()
        for arm, model in ARMS.items()
        for label, rate in RATES.items()
    ]
    return Recipe(name="shipped_loops", stages=stages)


def _arm(data: Data, model: ModelOptions, rate: float) -> LoopTrainer.Config:
    config = small_run(data, model, rate, "muon")
    config.held_out.windows, config.suite.questions = 32, 1_000
    return config


def chosen(arm: str, task: str) -> str:
    """Return the stage of an arm's best rate on the tuning seed, whose results must be there."""
    reading = f"static:{ARMS[arm].recurrent_steps}"
    runs = {run.stage: run.results for run in RunResult.all_of(TUNING / "shipped_loops")}
    stages = [f"{arm}_{task}_{label}" for label in RATES]
    if task == "text":
        names = [f"held_out/{source}/bits_per_byte/{reading}" for source in SOURCES]
        return min(stages, key=lambda stage: sum(runs[stage][name] for name in names))
    return max(
        stages, key=lambda stage: runs[stage][f"{MANO.name}/{TUNING_EXAM}/acc,none/{reading}"]
    )
