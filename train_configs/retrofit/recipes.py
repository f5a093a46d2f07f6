"""Loops made of dense models: SmolLM2-135M on one core, and TinyLlama-1.1B as published.

`retrofit_smollm2` has an arm a stage, each from a checkpoint of its own that `titan-loop retrofit`
made; `bash tools/retrofit.sh` fetches the model, makes them, trains and prints the tables. All arms
read the same windows of the quick start's corpus, in SmolLM2's tokens. `source` is the dense model,
trained on the same text, with which the others are compared. `identity` and `plain` draw R, with a
mean that grows from 1 to 2 over half of the tokens; `damped` runs its two half passes. The `tied`
arms have half of the layers, each for two, and adapters of a rank.

`retrofit_gemma3` does the same with Gemma 3 270M and a quarter of the tokens.

`retrofit_llama_1b` is McLeish et al. 2025, arXiv 2511.07384: TinyLlama-1.1B (22 layers) as 4/8/4, R
drawn with a mean that grows over three quarters of 52B tokens, eight steps of the backward pass,
Muon at 1e-3 and AdamW at 5e-5. Chosen here: the source fineweb-edu, window, batch, the shares of
warm-up and cool-down; the state starts as the prelude's output. Start it from TinyLlama's folder:

    titan-loop retrofit TinyLlama-1.1B --mode dropped --prelude 4 --core 8 --coda 4 \
        --recurrent-steps 32 --output runs/retrofit_llama_1b/start
    titan-loop plan retrofit_llama_1b --nodes 8
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.retrofit.distillation import DistillationLoss
from titan_loop.families.retrofit.surgery import Surgery
from titan_loop.models.dense import BlockOptions, DenseOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import bits_table, by_steps, cosine, recipe_of, run, text

CORPUS = "corpora/smollm2"
FOLDER = "runs/retrofit"
"""Folder of the dense run, `dense`, and of the arms' first checkpoints, `start/NAME`."""

SMOLLM2_TOKENS, SMOLLM2_ROWS = 65_536, 49_152

LLAMA_TOKENS = 52_000_000_000
LLAMA_START = "runs/retrofit_llama_1b/start"
"""Run of `titan-loop retrofit TINYLLAMA --mode dropped --prelude 4 --core 8 --coda 4`."""

DENSE = DenseOptions(size="smollm2-135m", tie_weights=True, rope_theta=100_000.0, recurrent_steps=1)
SPAN: dict[str, Any] = {"prelude": 6, "core": 6, "coda": 18}
"""The span of six layers whose second pass costs least untrained, by a scan of two windows."""

FOUR: dict[str, Any] = {"prelude": 12, "core": 4, "coda": 14}
"""The span of four layers whose two half passes cost least untrained, by a scan of 12 windows."""

HALVES: dict[str, Any] = {"prelude": 0, "core": 15, "coda": 0}
"""Half of the layers, each for two of the dense model's."""

STARTS = {
    "identity": Surgery(mode="identity", **SPAN),
    "plain": Surgery(mode="plain", **SPAN),
    "damped": Surgery(mode="damped", **SPAN),
    **{f"{mode}_four": Surgery(mode=mode, **FOUR) for mode in ("identity", "plain", "damped")},
    "identity_rank16": Surgery(mode="identity", rank=16, **SPAN),
    "dropped": Surgery(mode="dropped", prelude=6, core=8, coda=8),
    **{f"tied_rank{rank}": Surgery(mode="tied", rank=rank, **HALVES) for rank in (0, 8, 64)},
}
"""Name → surgery, whose run is FOLDER/start/NAME."""

GEMMA3_TOKENS = 16_384  # each costs five times as much
GEMMA3 = DenseOptions(
    **{"dim": 640, "n_layers": 18, "n_heads": 4, "n_kv_heads": 1, "hidden_dim": 2048},
    **{"vocab_size": 262_144, "head_dim": 256, "tie_weights": True, "recurrent_steps": 1},
    **{"norm_order": "both", "norm_offset": True, "norm_eps": 1e-6, "qk_norm": "head"},
    **{"activation": "gelu", "embedding_scale": 640**0.5, "attention_scale": 256**-0.5},
    **{"rope_theta": 1e6, "window_rope_theta": 1e4, "window": 512},
    windowed_layers=tuple(layer for layer in range(18) if (layer + 1) % 6),
)
"""Gemma 3 270M."""


class Source(NamedTuple):
    """A dense model, the folder of its runs, its data, and the surgeries of its arms."""

    dense: DenseOptions
    folder: str
    corpus: str
    tokens: int
    starts: Mapping[str, Surgery]


SMOLLM2 = Source(DENSE, FOLDER, CORPUS, SMOLLM2_TOKENS, STARTS)
GEMMA3_SPAN: dict[str, Any] = {"prelude": 10, "core": 4, "coda": 4}
"""The span of four layers whose second pass costs least untrained, by a scan of three windows."""

GEMMA3_STARTS = {
    mode: Surgery(mode=mode, **GEMMA3_SPAN) for mode in ("identity", "plain", "damped")
}
GEMMA = Source(GEMMA3, "runs/retrofit_gemma3", "corpora/gemma3", GEMMA3_TOKENS, GEMMA3_STARTS)


def grown(tokens: int) -> RecurrenceConfig:
    """Return R drawn, with a mean that grows from 1 to 2 over half of the tokens."""
    steps = Schedule.parse(f"0:1 linear {tokens // 2}:2")
    return RecurrenceConfig(steps=steps, poisson=True, lognormal_sigma=0.5, max_steps=4)


GROWN = grown(SMOLLM2_TOKENS)
ARMS: dict[str, dict[str, Any]] = {
    "source": {},
    "identity": {"start": "identity", "recurrence": GROWN, "new_rate_factor": 10.0},
    "plain": {"start": "plain", "recurrence": GROWN},
    "damped": {"start": "damped", "steps": 2},
    "identity_four": {"start": "identity_four", "recurrence": GROWN, "new_rate_factor": 10.0},
    "plain_four": {"start": "plain_four", "recurrence": GROWN},
    "damped_four": {"start": "damped_four", "steps": 2},
    **{f"tied_rank{r}": {"start": f"tied_rank{r}", "steps": 2, "rate": 5e-4} for r in (0, 8, 64)},
    **{
        f"tied_rank{r}_distilled": {
            "start": f"tied_rank{r}",
            "steps": 2,
            "rate": 5e-4,
            "distilled": 0.9,
        }
        for r in (0, 64)
    },
    "identity_new": {
        "start": "identity_rank16",
        "recurrence": RecurrenceConfig(steps=Schedule.constant(2)),
        "trained": "new",
        "new_rate_factor": 10.0,
        "distilled": 0.5,
        "taught_by_itself": True,
    },
    "dropped": {"start": "dropped", "recurrence": GROWN, "rate": 5e-4},
}
"""Name → options; `start` is one of `STARTS`, without one it is the dense model."""


GEMMA3_ARMS: dict[str, dict[str, Any]] = {
    "source": {},
    "identity": {"start": "identity", "recurrence": grown(GEMMA3_TOKENS), "new_rate_factor": 10.0},
    "plain": {"start": "plain", "recurrence": grown(GEMMA3_TOKENS)},
    "damped": {"start": "damped", "steps": 2},
}


def start_of(recipe: str, arm: str) -> tuple[str, ...]:
    """Return the name and the flags of an arm's start; nothing for the dense model."""
    arms, source = (GEMMA3_ARMS, GEMMA) if recipe == "retrofit_gemma3" else (ARMS, SMOLLM2)
    start = arms.get(arm, {}).get("start", arm if arm in source.starts else None)
    return () if start is None else (start, *source.starts[start].flags())


def _arm(
    *,
    start: str | None = None,
    steps: int = 1,
    recurrence: RecurrenceConfig | None = None,
    rate: float = 1e-4,
    distilled: float = 0.0,
    taught_by_itself: bool = False,
    of: Source = SMOLLM2,
    **options: Any,
) -> LoopTrainer.Config:
    """Return an arm; R is `steps` without a `recurrence`."""
    model: BlockOptions = of.dense if start is None else of.starts[start].options(of.dense)
    config = run(
        replace(model, recurrent_steps=steps, **options),
        text(of.corpus),
        tokens=of.tokens,
        window=256,
        windows=2,
        rate=cosine(rate, of.tokens, start=rate / 10),
        steps=recurrence or steps,
        held_out=HeldOutConfig(interval=0),
        save_every=64,
        log_every=8,
    )
    if distilled:
        teacher = "" if taught_by_itself else f"{of.folder}/dense"
        config.loss = DistillationLoss.Config(teacher=teacher, share=distilled)
    config.adamw.weight_decay = 0.0
    config.checkpoint.carry.parent = f"{of.folder}/{'dense' if start is None else f'start/{start}'}"
    config.checkpoint.carry.optimizer = False
    config.checkpoint.keep_latest_k = 2
    return config


def retrofit_smollm2() -> Recipe:
    """SmolLM2-135M made to loop, one mode an arm, on one core."""
    return recipe_of("retrofit_smollm2", {name: _arm(**arm) for name, arm in ARMS.items()})


def retrofit_gemma3() -> Recipe:
    """Gemma 3 270M made to loop, one mode an arm, on one core."""
    arms = [Stage(name=name, config=_arm(of=GEMMA, **arm)) for name, arm in GEMMA3_ARMS.items()]
    return Recipe(name="retrofit_gemma3", stages=arms)


def retrofit_llama_1b() -> Recipe:
    """TinyLlama with layers left out, looped 32 times, as published (arXiv 2511.07384)."""
    surgery = Surgery(mode="dropped", prelude=4, core=8, coda=4, recurrent_steps=32)
    dense = DenseOptions(size="tinyllama-1.1b", recurrent_steps=1)
    config = run(
        surgery.options(dense),
        WindowLoader.Config(mixture=["fineweb-edu=1"], max_epochs=1),
        tokens=LLAMA_TOKENS,
        window=1024,
        windows=1024,
        at_once=8,
        rate=Schedule.parse(
            f"0:0 linear {LLAMA_TOKENS // 100}:5e-5 constant {LLAMA_TOKENS * 9 // 10}:5e-5 "
            f"linear {LLAMA_TOKENS}:0"
        ),
        steps=RecurrenceConfig(
            steps=Schedule.parse(f"0:1 linear {LLAMA_TOKENS * 3 // 4}:32"),
            poisson=True,
            lognormal_sigma=0.5,
            backward_steps=8,
            max_steps=128,
        ),
        save_every=500,
        optimizer="muon",
    )
    config.muon.rate_factor = 20.0  # 1e-3 for matrices of the body, 5e-5 for the rest
    config.checkpoint.carry.parent = LLAMA_START
    config.checkpoint.carry.optimizer = False
    return Recipe(name="retrofit_llama_1b", stages=[Stage(name="retrofit_llama_1b", config=config)])


def _bits(name: str, title: str, arms: Iterable[str], message: str) -> ResultTable:
    rows = {arm: {"stage": arm} for arm in arms}
    return bits_table(
        name,
        title,
        rows,
        by_steps((1, 2, 4)),
        source="all",
        columns_are="recurrent steps",
        message=message,
    )


_TIED = [arm for arm in ARMS if arm.startswith("tied")]

TABLES = {
    "retrofit_smollm2": [
        _bits(
            "bits_per_byte",
            "held-out bits per byte, SmolLM2-135M",
            [arm for arm in ARMS if arm not in _TIED],
            "With layers 12-15 visited twice the model has {identity_four|R = 2} bits per byte, "
            "with layers 6-11 {identity|R = 2}, the dense model {source|R = 1} (one seed)",
        ),
        _bits(
            "tied",
            "held-out bits per byte, half of the layers",
            ["source", *_TIED],
            "With half of its layers visited twice the model has {tied_rank0|R = 2} bits per byte, "
            "with adapters of rank 64 and distillation {tied_rank64_distilled|R = 2}, the dense "
            "model {source|R = 1} (one seed)",
        ),
    ],
    "retrofit_gemma3": [
        _bits(
            "bits_per_byte",
            "held-out bits per byte, Gemma 3 270M",
            GEMMA3_ARMS,
            "Looped twice the model has {plain|R = 2} bits per byte, the dense model "
            "{source|R = 1} (one seed)",
        ),
    ],
}
