"""HRM-Text as published, and beside loops and a plain decoder in miniature.

    hrm_text_1b     the released model: pretraining on prompts and answers, then fine-tuning
    hrm_small       HRM-Text beside a plain decoder and a loop at equal parameters and FLOPs

`hrm_text_1b` reads two sources, tokenised with a tokenizer of at most 65,536 tokens as prompts and
answers (`titan-loop data tokenize --chat`) and packed into windows (`titan-loop data pack`):

    corpora/hrm_text/data-io   sapientinc/HRM-Text-data-io-cleaned-20260515, 40B tokens, 4 epochs
    corpora/hrm_text/sft       your own prompts and answers, 5 epochs

Published: sizes, cycles, window, batch, rates, warm-up, decay, β, averages, and the growth of the
backward pass from 2 to 5 passes over the first fifth. Not published, hence ours: tokens of an epoch
(15.0B, counted by a public rerun of their pipeline), ChatML in place of their marks, AdamW in place
of Adam-atan2 (no ε), the fine-tuning's window (theirs follows the data), and the way the work is
spread: 48 windows a step are shared by 16 groups of 4 GPUs (`titan-loop plan hrm_text_1b --nodes
8`), or by 4 such groups on the two nodes of the released run.

The small one asks where two stacks with cycles are worth more than one loop. Every arm of a task
has the same layers' parameters and optimiser: HRM-Text of 1 + 1 layers visited 8 times, two layers
visited once (`plain`) and four times (`loop`); their `_flops` arms get HRM-Text's training FLOPs in
place of its tokens. Tasks have prompts, which HRM-Text reads in both directions, but for
`hrm_causal`. Text has none.

Source: Wang et al. 2026 (HRM-Text), arXiv 2605.20613, and its released configuration.
"""

from dataclasses import replace
from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import ModelOptions
from titan_loop.plugins import find
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from titan_loop.training.weight_average import WeightAverageConfig

from ..runs import at, bits_table, by_source, cosine, run
from ..runs import text as text_data

CORPUS = "corpora/hrm_text"
WINDOW, BATCH = 4_096, 196_608
EPOCHS, EPOCH_TOKENS = 4, 15_016_536_580
TOKENS = EPOCHS * EPOCH_TOKENS // BATCH * BATCH
SFT_WINDOW, SFT_BATCH, SFT_STEPS = 2_048, 32_768, 1_300

HIGH, LOW = 2, 3
LEAST_REACH, MOST_REACH = 2, 5
"""Passes of a stack that the backward pass reaches, at first and after a fifth of the tokens."""

LAYERS, LOOPS = 2, HIGH * (LOW + 1) // 2
SHAPE: dict[str, Any] = {"size": "debugmodel", "dim": 96, "n_layers": LAYERS}
WIDE, WIDER = 256, 288
"""F of HRM-Text's layers, and of layers that have no gate: as many parameters."""

ARMS: dict[str, dict[str, Any]] = {
    "hrm": {"prefix_lm": True},
    "hrm_causal": {"prefix_lm": False},
    "plain": {"loops": 1},
    "plain_flops": {"loops": 1, "same_flops": True},
    "loop": {"loops": LOOPS},
    "loop_flops": {"loops": LOOPS, "same_flops": True},
}
BATCH_TOKENS = 1_024
TASKS: dict[str, tuple[GlobalBatchLoader.Config, int, int, int]] = {
    "text": (
        text_data(),
        256,
        BATCH_TOKENS,
        1_500_000,
    ),
    "mano": (
        TaskLoader.Config(task=Mano(modulus=5, max_operations=3)),
        64,
        BATCH_TOKENS,
        3_600_000,
    ),
}
"""Name → data, window, batch and tokens."""

if TwoGraph := find("tasks", "two_graph"):  # family discoloop, which may be deleted, has it
    _two_hops = TwoGraph(entities=40, relations=10, degree=10, inferred_ratio=7.5)
    _window = _two_hops.longest_example - 1
    _examples = TaskLoader.Config(task=_two_hops, window="example")
    TASKS["two_hop"] = (_examples, _window, 256 * _window, 2_400_000)

FLOPS = {"text": 9.60e12, "two_hop": 1.006e13, "mano": 1.639e13}
"""Training FLOPs of HRM-Text's arms; `titan-loop plan hrm_small` prints those of a token."""

_ROWS = {arm: at(arm, options.get("loops", HIGH)) for arm, options in ARMS.items()}
TABLES = {
    "hrm_small": [
        bits_table(
            "text",
            "held-out bits per byte",
            {arm: where for arm, where in _ROWS.items() if arm != "hrm"},
            {source: {"stage": "text", **where} for source, where in by_source().items()},
        ),
        ResultTable(
            name="tasks",
            title="% right",
            rows=_ROWS,
            columns={
                label: {"stage": task, "task": result}
                for label, task, result in (
                    ("two hops, in distribution", "two_hop", "two_graph/id_2"),
                    ("two hops, OOD", "two_hop", "two_graph/ood_2"),
                    ("arithmetic", "mano", "mano"),
                )
                if task in TASKS
            },
            everywhere={"metric": "acc,none"},
        ),
    ]
}


def hrm_text_1b() -> Recipe:
    """HRM-Text 1B: 60B tokens of prompts and answers, then fine-tuning on your own."""
    pretraining = _published("data-io", TOKENS, WINDOW, BATCH, epochs=EPOCHS)
    pretraining.learning_rate = Schedule.warmup_constant(2.2e-4, warmup_tokens=2_000 * BATCH)
    pretraining.recurrence.backward_growth = _growth(TOKENS)
    pretraining.ema = WeightAverageConfig(decay=0.9999)
    tokens = SFT_STEPS * SFT_BATCH
    sft = _published("sft", tokens, SFT_WINDOW, SFT_BATCH, epochs=5)
    sft.learning_rate = cosine(3e-5, tokens, warmup=0)
    sft.recurrence.backward_steps = MOST_REACH
    sft.ema = WeightAverageConfig(decay=0.999)
    sft.checkpoint.interval = 100
    return Recipe(
        name="hrm_text_1b",
        stages=[
            Stage(name="pretraining", config=pretraining),
            Stage(name="sft", config=sft, parent="pretraining"),
        ],
    )


def hrm_small() -> Recipe:
    """HRM-Text, a plain decoder and a plain loop on text, two hops and arithmetic, on one core."""
    stages = [
        Stage(name=f"{arm}_{task}", config=_small(task, **options))
        for task in TASKS
        for arm, options in ARMS.items()
        if (task, arm) != ("text", "hrm")  # text has no prompts
    ]
    return Recipe(name="hrm_small", stages=stages)


def _growth(tokens: int) -> Schedule:
    """Return the reach of the backward pass, which grows over the first fifth of `tokens`."""
    reaches = range(LEAST_REACH, MOST_REACH + 1)
    warmup = tokens // 5
    return Schedule.steps(
        (index * warmup // (len(reaches) - 1), reach) for index, reach in enumerate(reaches)
    )


def _published(
    source: str, tokens: int, window: int, batch: int, *, epochs: int
) -> LoopTrainer.Config:
    config = run(
        HrmTextOptions(size="1b"),
        WindowLoader.Config(
            mixture=[f"{CORPUS}/{source}=1:packed:max_epochs={epochs}"], prefix=True
        ),
        tokens=tokens,
        window=window,
        windows=batch // window,
        at_once=1,
        rate=Schedule.constant(0.0),  # a stage sets its own
        steps=HIGH,
        adamw=AdamWConfig(weight_decay=0.1, beta2=0.95, eps=1e-15),
        held_out=HeldOutConfig(depths=[1, HIGH]),
        activation_checkpoint=SelectiveAC.Config(),
        save_every=2_000,
        max_norm=1.0,
    )
    config.parallelism.tensor_parallel_degree = 4
    return config


def _small(
    task: str, *, loops: int | None = None, prefix_lm: bool = False, same_flops: bool = False
) -> LoopTrainer.Config:
    """Return an arm: HRM-Text, or with `loops` a stack that is visited so often."""
    data, window, batch, tokens = TASKS[task]
    model: ModelOptions = HrmTextOptions(
        **SHAPE, hidden_dim=WIDE, recurrent_steps=HIGH, low_cycles=LOW, prefix_lm=prefix_lm
    )
    recurrence = RecurrenceConfig(steps=Schedule.constant(HIGH), backward_growth=_growth(tokens))
    if loops is not None:
        model = OuroOptions(**SHAPE, hidden_dim=WIDER, recurrent_steps=loops, exit_gate=False)
        recurrence = RecurrenceConfig(steps=Schedule.constant(loops))
    steps = loops or HIGH
    config = run(
        model,
        replace(data, prefix=prefix_lm),
        tokens=tokens,
        window=window,
        windows=batch // window,
        rate=cosine(1e-2, tokens),
        steps=recurrence,
        total_flops=FLOPS[task] if same_flops else None,
        held_out=HeldOutConfig(depths=[steps], windows=128),
        save_every=10_000,
        log_every=50,
    )
    if task != "text":
        assert isinstance(data, TaskLoader.Config)
        config.suite = SuiteConfig(
            interval=1_000, tasks=[data.task.name], depths=[steps], questions=500
        )
        config.adamw.beta2 = 0.98
    config.optimizer.name = "muon"
    config.checkpoint.keep_latest_k = 2
    return config
