"""Ouro's recipe in miniature: every kind of stage, on one machine without a GPU.

    1a ─┬─ 1b ── annealing ── longct ── mid_training ── gate        4 layers, R = 8 then 4
        └─ 1b_upcycled ── … ── gate_upcycled                        8 layers, R = 4

As in `ouro/`: warm-up and batch ramp, R halved after 1a, the fork with twice the layers, β from
0.1 to 0.05, RoPE bases 10K, 40K and 1M, windows ×1, ×2, ×4, ×2, packed long documents, ChatML with
replay, and finally the gate on the frozen model. It has ten million times fewer tokens and the
learning rates of a small model; see README.md.

`bash tools/miniature.sh` prepares the data and runs the recipe.
"""

from dataclasses import dataclass, replace

from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..depth_read.readable_steps import ReadableStepsLoss
from ..runs import run

BATCH_TOKENS = 1024
WINDOW, ANNEALING_WINDOW, LONG_WINDOW = 256, 512, 1024
PEAK_RATE, ANNEALED_RATE, FINAL_RATE = 4e-3, 4e-4, 1e-4
LAYERS, UPCYCLED_LAYERS = 4, 8
UPCYCLED = "_upcycled"
HELD_OUT_TOKENS = 4096  # of each source, as many at every window length
LAST_STEP_ONLY = 10**9

PRETRAINING = {"code": "0.4", "prose": "0.4", "math": "0.2"}
ANNEALING = {"code": "0.35", "prose": "0.3", "math": "0.35"}
LONG = {"code": "0.6:packed", "prose": "0.4:packed"}
MID_TRAINING = {"chat": "0.3:packed", "code": "0.25", "prose": "0.25", "math": "0.2"}


def miniature() -> Recipe:
    """Every stage of Ouro's recipe and the fork of its larger model, in minutes on a CPU."""
    return _recipe("miniature", corpus="corpora/miniature", share=1.0)


def miniature_short() -> Recipe:
    """The miniature on 1/32 of its tokens: shows that all stages run, not that they learn."""
    return _recipe("miniature_short", corpus="corpora/short", share=1 / 32)


def miniature_readable() -> Recipe:
    """The kept branch with a readout for each step; half of the loss is the last step's alone."""
    recipe = _recipe("miniature_readable", corpus="corpora/miniature", share=1.0)
    recipe.stages = [stage for stage in recipe.stages if not stage.name.endswith(UPCYCLED)]
    for stage in recipe.stages:
        stage.config.model = replace(stage.config.model, readout_rank=32)
        if stage.config.trainable == "all":
            stage.config.loss = ReadableStepsLoss.Config(
                every_step=Schedule.constant(0.5), weights="even"
            )
    return recipe


@dataclass(frozen=True, slots=True)
class _Scale:
    """The folder of the sources, and the share of the tokens to train on."""

    corpus: str
    share: float

    def tokens(self, count: int) -> int:
        """Return the share of `count` tokens in whole batches, at least one."""
        return max(1, round(count * self.share / BATCH_TOKENS)) * BATCH_TOKENS

    def mixture(self, weights: dict[str, str]) -> list[str]:
        """Return sources of the corpus with their weights."""
        return [f"{self.corpus}/{name}={weight}" for name, weight in weights.items()]


def _recipe(name: str, *, corpus: str, share: float) -> Recipe:
    scale = _Scale(corpus, share)
    branches = [*_branch(scale), *_branch(scale, UPCYCLED, layers=UPCYCLED_LAYERS)]
    return Recipe(name=name, stages=[_stage_1a(scale), *branches])


def _stage_1a(scale: _Scale) -> Stage:
    """Twice the recurrent steps of all later stages; the rate warms up and the batch grows."""
    config = _config(
        scale,
        seed=0,
        tokens=180_000,
        window=WINDOW,
        learning_rate=Schedule.warmup_constant(PEAK_RATE, warmup_tokens=scale.tokens(20_000)),
        mixture=PRETRAINING,
    )
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(8))
    config.held_out.depths.append(8)
    config.entropy_weight = Schedule.constant(0.1)
    ramp = Schedule.parse(f"0:{BATCH_TOKENS // 2} linear {scale.tokens(45_000)}:{BATCH_TOKENS}")
    config.batch = BatchConfig(global_batch_tokens=ramp)
    config.training.local_batch_size = 2  # divides the ramp's smallest batch
    return Stage(name="1a", config=config)


def _branch(scale: _Scale, suffix: str = "", *, layers: int = LAYERS) -> list[Stage]:
    """Return the stages after 1a of one of the two models."""
    annealing_tokens, mid_training_tokens = 48_000, 48_000
    mid_training = Schedule.parse(
        f"0:{ANNEALED_RATE} cosine {scale.tokens(mid_training_tokens)}:{FINAL_RATE}"
    )
    configs = {
        "1b": _config(
            scale,
            seed=1,
            tokens=120_000,
            window=WINDOW,
            learning_rate=Schedule.constant(PEAK_RATE),
            mixture=PRETRAINING,
        ),
        "annealing": _config(
            scale,
            seed=2,
            tokens=annealing_tokens,
            window=ANNEALING_WINDOW,
            rope_theta=40_000.0,
            learning_rate=Schedule.parse(
                f"0:{PEAK_RATE} cosine {scale.tokens(annealing_tokens)}:{ANNEALED_RATE}"
            ),
            mixture=ANNEALING,
        ),
        "longct": _config(
            scale,
            seed=3,
            tokens=24_000,
            window=LONG_WINDOW,
            rope_theta=1e6,
            learning_rate=Schedule.constant(ANNEALED_RATE),
            mixture=LONG,
        ),
        "mid_training": _config(
            scale,
            seed=4,
            tokens=mid_training_tokens,
            window=ANNEALING_WINDOW,
            rope_theta=1e6,
            learning_rate=mid_training,
            mixture=MID_TRAINING,
        ),
        "gate": _gate(scale),
    }
    stages: list[Stage] = []
    for name, config in configs.items():
        config.model.n_layers = layers
        parent = stages[-1].name if stages else "1a"
        stages.append(Stage(name=name + suffix, parent=parent, config=config))
    if layers != LAYERS:
        stages[0].config.checkpoint.carry.upcycle = "stacked"
    return stages


def _gate(scale: _Scale) -> LoopTrainer.Config:
    """Stage II: the language model is frozen, the gate learns when another step still helps."""
    config = _config(
        scale,
        seed=5,
        tokens=24_000,
        window=ANNEALING_WINDOW,
        rope_theta=1e6,
        learning_rate=Schedule.constant(0.01),
        mixture=MID_TRAINING,
    )
    config.trainable = "exit_gate"
    config.loss = AdaptiveGateLoss.Config()
    config.checkpoint.carry.optimizer = False
    return config


def _config(
    scale: _Scale,
    *,
    seed: int,
    tokens: int,
    window: int,
    learning_rate: Schedule,
    mixture: dict[str, str],
    rope_theta: float = 10_000.0,
) -> LoopTrainer.Config:
    """Return the settings that all stages share: R = 4, β = 0.05, 1,024 tokens a batch.

    Every stage has its own seed; otherwise it would repeat its parent's windows in the same order.
    """
    return run(
        OuroOptions(size="quickstart", n_layers=LAYERS, rope_theta=rope_theta),
        WindowLoader.Config(mixture=scale.mixture(mixture), seed=seed, max_epochs=4),
        tokens=scale.tokens(tokens),
        window=window,
        windows=BATCH_TOKENS // window,
        rate=learning_rate,
        steps=4,
        entropy_weight=Schedule.constant(0.05),
        held_out=HeldOutConfig(
            interval=LAST_STEP_ONLY,
            sources=[f"{scale.corpus}/{name}" for name in MID_TRAINING],
            depths=[1, 2, 3, 4],
            windows=max(1, round(scale.share * HELD_OUT_TOKENS / window)),
        ),
        save_every=100,
        log_every=5,
        keep_latest=2,
    )
