"""Looped Llama blocks on the quick start's corpus: a model that inference engines run.

titan-loop train nanbeige_quickstart
titan-loop convert export runs/nanbeige --to gguf --output nanbeige.gguf
bash tools/chat.sh nanbeige.gguf

`few_bits`, by tools/few_bits.sh, has small ones by R and shape: the cost of each type of a GGUF.
"""

from titan_loop.analysis.results import ResultTable
from titan_loop.models.dense import DenseOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..quickstart.recipes import quickstart
from ..runs import run, text

FEW_BITS_TOKENS = 200_000
SHAPES = {"d256": (1, 256, (1, 4, 8)), "d128": (4, 128, (1, 4))}
"""Name → layers, D, and R of its arms."""
TYPES = ("float16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")
_ARMS = {
    f"{name}_r{steps}": (layers, dim, steps)
    for name, (layers, dim, depths) in SHAPES.items()
    for steps in depths
}

TABLES = {
    "few_bits": [
        ResultTable(
            name="bits",
            title="held-out bits per byte of the run, and what a type adds in llama.cpp",
            rows={
                f"{layers} x D {dim}, R = {steps}" + " (dense)" * (steps == 1): {"stage": arm}
                for arm, (layers, dim, steps) in _ARMS.items()
            },
            columns={
                "run": {"metric": "bits_per_byte", "reading": "run"},
                **{name: {"metric": "bits_added", "reading": name} for name in TYPES},
            },
            everywhere={"task": "held_out/all"},
            factor=1.0,
            digits=4,
        )
    ],
}


def nanbeige_quickstart() -> LoopTrainer.Config:
    """The quick start with a pre-norm block, no gate and no norm between the four steps."""
    config = quickstart()
    config.dump_folder = "runs/nanbeige"
    config.model = DenseOptions(
        size="quickstart",
        n_layers=1,
        dim=96,
        n_heads=3,
        n_kv_heads=3,
        hidden_dim=256,
        recurrent_steps=4,
    )
    return config


def few_bits() -> Recipe:
    """A layer of D 256 and four of D 128, dense and looped; minutes each on one core."""
    return Recipe(
        name="few_bits",
        stages=[Stage(name=arm, config=_few_bits(*shape)) for arm, shape in _ARMS.items()],
    )


def _few_bits(layers: int, dim: int, steps: int) -> LoopTrainer.Config:
    return run(
        DenseOptions(
            size="quickstart",
            n_layers=layers,
            dim=dim,
            n_heads=dim // 32,
            n_kv_heads=dim // 32,
            hidden_dim=512,
            recurrent_steps=steps,
        ),
        text(),
        tokens=FEW_BITS_TOKENS,
        window=256,
        windows=4,
        rate=Schedule.warmup_cosine(
            1e-2, start=1e-3, warmup_tokens=20_000, total_tokens=FEW_BITS_TOKENS, final=1e-4
        ),
        steps=steps,
        save_every=100_000,  # at the end alone
        optimizer="muon",
    )
