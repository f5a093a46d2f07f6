"""Cases of latent steps, on graphs of equations."""

from dataclasses import replace
from pathlib import Path

from tests.contracts.families import Contract, Run
from tests.contracts.runs import small_run
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.latent.model import LatentOptions
from titan_loop.families.latent.objective import LatentSupervision
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.latent.task import DagArithmetic

TASK = DagArithmetic(modulus=5, nodes=6, leaves=3, names=12, most_depth=4, test_nodes=(5, 9))
WINDOW = 40
OPTIONS = LatentOptions(size="debugmodel", relative_window=8)
BUILT = LatentOptions(vocab_size=7, factors=(5, 17, 3), relative_window=8)


def run(folder: Path, world: int) -> LoopTrainer.Config:
    """Return four steps, each as deep as its batch."""
    config = small_run(folder, replace(OPTIONS))
    config.total_tokens = 4 * 4 * WINDOW
    config.dataloader = TaskLoader.Config(task=TASK, all_targets=True)
    config.loss = LatentSupervision.Config()
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(4), from_data=True, max_steps=4)
    config.batch = BatchConfig(global_batch_tokens=Schedule.constant(4 * WINDOW))
    config.training.seq_len = WINDOW
    return config


def rehearsed(config: LoopTrainer.Config) -> None:
    """Attention weights, and the padding of two rows on eight ranks."""
    config.dataloader = TaskLoader.Config(task=TASK, all_targets=True)
    config.training.seq_len, config.loss = 256, LatentSupervision.Config()
    config.model = LatentOptions(size="debugmodel", n_layers=1, state="discrete", dropout=0.1)
    config.recurrence.steps = Schedule.constant(2)
    config.batch.global_batch_tokens = Schedule.constant(8 * 256)
    config.total_tokens = 6 * 8 * 256


CONTRACT = Contract(
    runs={"discrete": Run(run, close=("ce/step_1", "ce/factors"))},
    rehearsed={"discrete": rehearsed},
    refused=[
        (replace(BUILT, exit_gate=True), "model.exit_gate=True does not work with model.family="),
        (replace(BUILT, injection="diagonal"), "model.injection=diagonal does not work"),
        (replace(BUILT, prelude_layers=1), "model.prelude_layers=1 does not work"),
        (
            replace(BUILT, scale_scores_by_terms=True, positions="none", relative_window=None),
            "needs the terms of model.positions=deberta, not none",
        ),
        (replace(BUILT, norm_placement="readout"), "model.norm_placement=readout has no effect"),
        (replace(BUILT, corruption=0.1, state="continuous"), "needs the discrete values of mod"),
    ],
)
