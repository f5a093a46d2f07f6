"""Looped mixtures of experts: four kinds of models at equal FLOPs, and xLLM's as published.

`looped_moe_small` has an arm a stage, on the quick start's corpus. `dense`, `looped_dense`, `moe`
and `looped_moe` cost the same FLOPs within 1 %, and the two mixtures have the same parameters; the
arms named `_parameters` have as many parameters as the mixtures, all of them active. The looped
arms visit two layers twice where the others have four; `looped_moe` has the experts of two layers
in one (arXiv 2609.35751). `looped_moe_rates` trains every arm at other learning rates.

    bash tools/looped_moe.sh --seeds "1 2 3"
    bash tools/looped_moe.sh --rates --seeds 1

`xllm_moe_ouro` is the looped mixture of arXiv 2610.06833, Part I, and its released recipe: 28
layers, 25 experts of which a token visits 2, R = 4, 500B tokens. Chosen here: the source
fineweb-edu, normalised scores, and the balance by windows. 25 experts are spread over ranks by FSDP
alone; with 24 of them, eight ranks can share a layer's:

    titan-loop plan xllm_moe_ouro --nodes 8
    titan-loop plan xllm_moe_ouro --nodes 8 --rehearse --model.experts 24 \
        --parallelism.expert-parallel-degree 8
"""

from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.families.nanbeige.model import NanbeigeOptions
from titan_loop.models.llama import LlamaOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.quickstart import QUICK_TOKENS, quickstart

DIM, EXPERT_WIDTH = 96, 128
SHAPE: dict[str, Any] = {"size": "quickstart", "dim": DIM, "n_heads": 4, "n_kv_heads": 4}
LAYERS, LOOPED_LAYERS, STEPS = 4, 2, 2
EXPERTS, TOP_K = 8, 2
# A layer with the experts of two, and those that take the place of the other layer's attention.
FLAT_EXPERTS = 2 * EXPERTS + 4 * DIM * DIM // (3 * DIM * EXPERT_WIDTH)


def _dense(layers: int, experts: int = TOP_K) -> NanbeigeOptions:
    """Return a dense model whose feed-forwards are as wide as so many experts."""
    return NanbeigeOptions(n_layers=layers, hidden_dim=experts * EXPERT_WIDTH, **SHAPE)


def _sparse(layers: int, experts: int) -> MoEOptions:
    return MoEOptions(
        n_layers=layers, hidden_dim=EXPERT_WIDTH, experts=experts, top_k=TOP_K, **SHAPE
    )


ARMS: dict[str, tuple[LlamaOptions, int]] = {
    "dense": (_dense(LAYERS), 1),
    "looped_dense": (_dense(LOOPED_LAYERS), STEPS),
    "moe": (_sparse(LAYERS, EXPERTS), 1),
    "looped_moe": (_sparse(LOOPED_LAYERS, FLAT_EXPERTS), STEPS),
    "dense_parameters": (_dense(LAYERS, EXPERTS), 1),
    "looped_dense_parameters": (_dense(LOOPED_LAYERS, FLAT_EXPERTS), STEPS),
}
"""Name → model and R."""

RATE = 1e-2
RATES = {"5e-3": 5e-3, "2e-2": 2e-2}
"""Largest learning rates of `looped_moe_rates`, beside the rate of `looped_moe_small`."""

_TRAINED = {
    name: {"stage": name, "reading": f"static:{steps}"} for name, (_, steps) in ARMS.items()
}
TABLES = {
    "looped_moe_small": [
        ResultTable(
            name="bits_per_byte",
            title="held-out bits per byte at the trained R",
            rows=_TRAINED,
            columns={
                source: {"task": f"held_out/{source}", "metric": "bits_per_byte"}
                for source in ("code", "prose", "math", "all")
            },
            factor=1.0,
            digits=3,
            less="dense",
            against_flops="all",
        )
    ],
    "looped_moe_rates": [
        ResultTable(
            name="bits_per_byte",
            title="held-out bits per byte at the trained R, by learning rate",
            rows=_TRAINED,
            columns={rate: {"stage": rate} for rate in RATES},
            everywhere={"task": "held_out/all", "metric": "bits_per_byte"},
            columns_are="largest learning rate",
            factor=1.0,
            digits=3,
        )
    ],
}

XLLM_TOKENS_PER_STEP = 512 * 8192
XLLM_STEPS = 119_210


def looped_moe_small() -> Recipe:
    """Dense or sparse, looped or not, at equal FLOPs and at equal parameters, on two cores."""
    return Recipe(
        name="looped_moe_small",
        stages=[Stage(name=name, config=_arm(*arm)) for name, arm in ARMS.items()],
    )


def looped_moe_rates() -> Recipe:
    """The arms of `looped_moe_small` at other learning rates."""
    return Recipe(
        name="looped_moe_rates",
        stages=[
            Stage(name=f"{name}_{rate}", config=_arm(*arm, rate=value))
            for name, arm in ARMS.items()
            for rate, value in RATES.items()
        ],
    )


def _arm(model: LlamaOptions, steps: int, rate: float = RATE) -> LoopTrainer.Config:
    config = quickstart()
    config.dump_folder, config.model = "", model
    config.learning_rate = Schedule.warmup_cosine(
        rate,
        start=rate / 10,
        warmup_tokens=150_000,
        total_tokens=QUICK_TOKENS,
        final=rate / 100,
    )
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(steps))
    if isinstance(model, MoEOptions):
        config.loss = MoELoss.Config(balance_weight=1e-3)
    config.held_out.depths, config.held_out.windows = [steps], 128
    return config


def xllm_moe_ouro() -> Recipe:
    """The looped mixture of xLLM, 8B parameters of which 0.8B are active (arXiv 2610.06833)."""
    total = XLLM_STEPS * XLLM_TOKENS_PER_STEP
    config = LoopTrainer.Config(
        total_tokens=total,
        model=MoEOptions(
            size="xllm",
            experts=25,
            top_k=2,
            expert_hidden_dim=2432,
            bias_rate=0.0,
            rope_theta=1e6,
            norm_eps=1e-6,
        ),
        loss=MoELoss.Config(balance_weight=1e-3),
        dataloader=WindowLoader.Config(mixture=["fineweb-edu=1"]),
        learning_rate=Schedule.warmup_cosine(
            6e-4,
            start=6e-8,
            warmup_tokens=200 * XLLM_TOKENS_PER_STEP,
            total_tokens=total,
            final=6e-6,
        ),
        recurrence=RecurrenceConfig(steps=Schedule.constant(4)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(XLLM_TOKENS_PER_STEP)),
    )
    config.adamw.beta2 = 0.98
    config.training.seq_len = 8192
    config.training.local_batch_size = 1
    config.activation_checkpoint = FullAC.Config()
    return Recipe(name="xllm_moe_ouro", stages=[Stage(name="xllm_moe_ouro", config=config)])
