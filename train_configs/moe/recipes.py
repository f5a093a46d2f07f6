"""Looped mixtures of experts: four kinds of models at equal FLOPs, and xLLM's as published.

`looped_moe_small` has an arm a stage, on the quick start's corpus. `dense`, `looped_dense`, `moe`
and `looped_moe` cost the same FLOPs within 1 %, and the two mixtures have the same parameters; the
arms named `_parameters` have as many parameters as the mixtures, all of them active. The looped
arms visit two layers twice where the others have four; `looped_moe` has the experts of two layers
in one (arXiv 2609.35751). Further stages change one thing in the arms of equal FLOPs (within 2 %):
the learning rate in all four, and in the mixtures what only they have.

    bash tools/looped_moe.sh --seeds "1 2 3" dense looped_dense moe looped_moe
    bash tools/looped_moe.sh --seeds 1 looped_moe_k1 moe_k1

`xllm_moe_ouro` is the looped mixture of arXiv 2610.06833, Part I, and its released recipe: 28
layers, 25 experts of which a token visits 2, R = 4, 500B tokens. Chosen here: the source
fineweb-edu, normalised scores, and the balance by windows. 25 experts are spread over ranks by FSDP
alone; with 24 of them, eight ranks can share a layer's:

    titan-loop plan xllm_moe_ouro --nodes 8
    titan-loop plan xllm_moe_ouro --nodes 8 --rehearse --model.experts 24 \
        --parallelism.expert-parallel-degree 8
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.models.dense import DenseOptions
from titan_loop.models.llama import LlamaOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..quickstart.recipes import QUICK_TOKENS, quickstart
from ..runs import SOURCES, at, bits_table, by_source, recipe_of, run

DIM, EXPERT_WIDTH = 96, 128
SHAPE: dict[str, Any] = {"size": "quickstart", "dim": DIM, "n_heads": 4, "n_kv_heads": 4}
VISITS, STEPS = 4, 2
EXPERTS, TOP_K = 8, 2


def _flat_experts(layers: int, width: int = EXPERT_WIDTH) -> int:
    """Return the experts of so many layers, and those that replace all attentions but one."""
    attentions = (layers - 1) * 4 * DIM * DIM
    return layers * EXPERTS * EXPERT_WIDTH // width + attentions // (3 * DIM * width)


def _dense(steps: int, experts: int = TOP_K) -> DenseOptions:
    """Return a dense model whose feed-forwards are as wide as so many experts."""
    return DenseOptions(n_layers=VISITS // steps, hidden_dim=experts * EXPERT_WIDTH, **SHAPE)


def _sparse(steps: int, top_k: int = TOP_K, **changes: Any) -> MoEOptions:
    """Return a mixture whose layers hold the experts of R layers, k of them as wide as two."""
    width = TOP_K * EXPERT_WIDTH // top_k
    return MoEOptions(
        n_layers=VISITS // steps,
        hidden_dim=width,
        experts=_flat_experts(steps, width),
        top_k=top_k,
        **SHAPE,
        **changes,
    )


ARMS: dict[str, tuple[LlamaOptions, int]] = {
    "dense": (_dense(1), 1),
    "looped_dense": (_dense(STEPS), STEPS),
    "moe": (_sparse(1), 1),
    "looped_moe": (_sparse(STEPS), STEPS),
    "dense_parameters": (_dense(1, EXPERTS), 1),
    "looped_dense_parameters": (_dense(STEPS, _flat_experts(STEPS)), STEPS),
}
"""Name → model and R."""

RATE = 1e-2
RATES = {"5e-3": 5e-3, "2e-2": 2e-2}
MIXTURE_SETTINGS: dict[str, dict[str, Any]] = {
    "k1": {"top_k": 1},
    "k4": {"top_k": 4},
    "softmax": {"router": "softmax"},
    "loss_alone": {"bias_rate": 0.0},
}
"""Settings of both mixtures; without a bias, experts are balanced by the loss alone."""

LOOP_SETTINGS: dict[str, dict[str, Any]] = {
    "routers": {"routers": STEPS},
    "attentions": {"attentions": STEPS},
    "visits": {"residual_scale": "visits"},
}
"""Settings of the looped mixture alone, beside R = 4."""

SETTINGS: dict[str, tuple[LlamaOptions, int, float]] = {
    **{
        f"{arm}_{name}": (*ARMS[arm], rate)
        for arm in ("dense", "looped_dense", "moe", "looped_moe")
        for name, rate in RATES.items()
    },
    **{f"moe_{name}": (_sparse(1, **new), 1, RATE) for name, new in MIXTURE_SETTINGS.items()},
    **{
        f"looped_moe_{name}": (_sparse(STEPS, **new), STEPS, RATE)
        for name, new in (MIXTURE_SETTINGS | LOOP_SETTINGS).items()
    },
    "looped_moe_r4": (_sparse(VISITS), VISITS, RATE),
}
"""Name → model, R and largest learning rate."""


def _table(name: str, arms: Mapping[str, tuple[Any, ...]], less: str) -> ResultTable:
    return bits_table(
        name,
        "held-out bits per byte at the trained R",
        {arm: at(arm, own[1]) for arm, own in arms.items()},
        by_source((*SOURCES, "all")),
        less=less,
        against_flops="all",
    )


TABLES = {
    "looped_moe_small": [
        _table("bits_per_byte", ARMS, "dense"),
        _table(
            "settings", {"moe": ARMS["moe"], "looped_moe": ARMS["looped_moe"], **SETTINGS}, "moe"
        ),
    ]
}

XLLM_BATCH = 512 * 8192


def looped_moe_small() -> Recipe:
    """Dense or sparse, looped or not, at equal FLOPs and at equal parameters, on two cores."""
    arms = {**{name: (*arm, RATE) for name, arm in ARMS.items()}, **SETTINGS}
    return recipe_of("looped_moe_small", {name: _arm(*arm) for name, arm in arms.items()})


def _arm(model: LlamaOptions, steps: int, rate: float) -> LoopTrainer.Config:
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
    total = 119_210 * XLLM_BATCH
    config = run(
        MoEOptions(
            size="xllm",
            experts=25,
            top_k=2,
            expert_hidden_dim=2432,
            bias_rate=0.0,
            rope_theta=1e6,
            norm_eps=1e-6,
        ),
        WindowLoader.Config(mixture=["fineweb-edu=1"]),
        tokens=total,
        window=8192,
        windows=512,
        at_once=1,
        rate=Schedule.warmup_cosine(
            6e-4, start=6e-8, warmup_tokens=200 * XLLM_BATCH, total_tokens=total, final=6e-6
        ),
        steps=4,
        loss=MoELoss.Config(balance_weight=1e-3),
        activation_checkpoint=FullAC.Config(),
        save_every=500,
    )
    config.adamw.beta2 = 0.98
    return Recipe(name="xllm_moe_ouro", stages=[Stage(name="xllm_moe_ouro", config=config)])
