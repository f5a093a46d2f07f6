"""Adaptive loops and memory: layers that loop as often as they decide, and banks that they read.

    adaptive_200m    language models on 13.9B tokens, as published: loops, memory, baselines
    adaptive_small   arithmetic and biographies in miniature, for one core

Published: sizes, N_max, slots, gate biases, α = −7, λ = 0, peak rate, cosine, tokens and steps. Not
published, hence ours: the window (2,048 tokens), warm-up, final rate and weight decay, and the
feed-forward widths of the wider baselines, which follow from the parameters they are to match.

`adaptive_200m` reads one source, deduplicated, with a tokenizer of at most 50,304 tokens:

    corpora/adaptive/fineweb-edu      HuggingFaceFW/fineweb-edu, sample-100BT

The small one asks for the paper's two findings where a core can see them: loops help arithmetic
(Mano, % right), memory helps facts that must be known by heart (Capo, bits a person). It has one
layer, since two need no loops for this arithmetic, and α starts at 0: from −7 it would take most of
the run.

Source: Frey et al. 2026, "Adaptive loops and memory in transformers", Appendix A.1 and Table 2.
"""

from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.families.adaptive.objective import PonderCostLoss
from titan_loop.recipes.recipe import Recipe
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..physics.capo import Capo
from ..runs import cosine, recipe_of, run
from .task import ManoCapo

CORPUS = "corpora/adaptive/fineweb-edu"
WINDOW_200M, BATCH_200M = 2_048, 176 * 2_048
TOKENS_200M = 38_620 * BATCH_200M

SMALL_TASK = ManoCapo(
    mano=Mano(modulus=5, max_operations=3),
    capo=Capo(
        people=600,
        first_names=20,
        middle_names=20,
        last_names=50,
        years=50,
        cities=50,
        universities=50,
        majors=20,
        employers=50,
    ),
    mano_share=0.95,  # of examples; of the tokens that are learned it is under a half
)
SMALL_WINDOW, SMALL_BATCH = 64, 16 * 64
SMALL_TOKENS = 4_000 * SMALL_BATCH
LOOPS: dict[str, Any] = {"scale_init": 0.0}
SMALL_ARMS: dict[str, dict[str, Any]] = {
    "plain": {"max_iterations": None},
    "loop3": LOOPS,
    "loop3_memory": {**LOOPS, "local_slots": 512, "global_slots": 256},
    "iso_parameter": {"max_iterations": None, "hidden_dim": 1_086},  # as many as loop3_memory
    "iso_flop": {"max_iterations": None, "n_layers": 3},
    "loop3_decay": {**LOOPS, "decay_controls": True},
}


def adaptive_200m() -> Recipe:
    """Language models of 12 layers on 13.9B tokens: loops, memory, wider and deeper baselines."""
    plain: dict[str, Any] = {"max_iterations": None}
    banks = {"local_slots": 1024, "global_slots": 512}
    arms: dict[str, dict[str, Any]] = {
        "base": plain,
        **{f"loop{most}": {"max_iterations": most} for most in (3, 5, 7)},
        "iso_flop": {**plain, "n_layers": 36},
        # 34M parameters more, as loop3 with memory has: 12 · 2 · 768 · 1,838.
        "iso_parameter_memory": {**plain, "hidden_dim": 4_910},
        "memory_closed": {**banks, "gate_bias": -3.0},
        "memory_balanced": {**banks, "gate_bias": 0.0},
        "memory_open": {**banks, "gate_bias": 3.0},
        # The published 480M: 36 · 2 · 768 · 2,680 parameters more than iso_flop.
        "iso_flop_memory": {**plain, "n_layers": 36, "hidden_dim": 5_752},
    }
    return recipe_of("adaptive_200m", {name: _language(options) for name, options in arms.items()})


def adaptive_small() -> Recipe:
    """One layer of D 64 on arithmetic and biographies, on one core: loops, memory, baselines."""
    return recipe_of(
        "adaptive_small", {name: _small(options) for name, options in SMALL_ARMS.items()}
    )


def _language(options: dict[str, Any]) -> LoopTrainer.Config:
    return run(
        AdaptiveOptions(size="published", vocab_size=50_304, **options),
        WindowLoader.Config(mixture=[f"{CORPUS}=1"]),
        tokens=TOKENS_200M,
        window=WINDOW_200M,
        windows=BATCH_200M // WINDOW_200M,
        at_once=2,
        rate=Schedule.warmup_cosine(
            3e-3, warmup_tokens=1_000 * BATCH_200M, total_tokens=TOKENS_200M, final=3e-4
        ),
        steps=1,
        adamw=AdamWConfig(weight_decay=0.1),
        loss=PonderCostLoss.Config(),
        held_out=HeldOutConfig(depths=[1]),
        activation_checkpoint=SelectiveAC.Config(),
        save_every=1_000,
        max_norm=1.0,
    )


def _small(options: dict[str, Any]) -> LoopTrainer.Config:
    return run(
        AdaptiveOptions(size="debugmodel", **{"n_layers": 1, **options}),
        TaskLoader.Config(task=SMALL_TASK),
        tokens=SMALL_TOKENS,
        window=SMALL_WINDOW,
        windows=SMALL_BATCH // SMALL_WINDOW,
        rate=cosine(1e-2, SMALL_TOKENS, warmup=200 * SMALL_BATCH),
        steps=1,
        adamw=AdamWConfig(beta2=0.98, weight_decay=0.1),
        optimizer="muon",
        loss=PonderCostLoss.Config(),
        suite=SuiteConfig(interval=500, tasks=[SMALL_TASK.name], depths=[1], questions=400),
        save_every=2_000,
        log_every=100,
        keep_latest=2,
    )


_ROWS = {name.replace("_", " "): {"stage": name} for name in SMALL_ARMS}
TABLES = {
    "adaptive_small": [
        ResultTable(
            name="mano",
            title="% right",
            rows=_ROWS,
            columns={
                "Mano": {"stratum": "mano"},
                "names": {"stratum": "names"},
                "values": {"stratum": "values"},
            },
            everywhere={"task": "mano_capo", "metric": "acc,none", "reading": "static:1"},
        ),
        ResultTable(
            name="capo",
            title="bits known",
            rows=_ROWS,
            columns={
                "of a person": {"metric": "bits"},
                "of a name": {"metric": "names_bits"},
                "of the values": {"metric": "values_bits"},
                "per parameter": {"metric": "bits_per_parameter"},
                "per inner parameter": {"metric": "bits_per_inner_parameter"},
            },
            everywhere={"task": "mano_capo", "stratum": "knowledge", "reading": "static:1"},
            factor=1.0,
            digits=2,
        ),
    ]
}
