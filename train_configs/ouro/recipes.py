"""Ouro (LoopLM) 1.4B and 2.6B: the whole recipe, its scaling study and its prior ablation.

    1a ─┬─ 1b ── ct_annealing ── longct ── mid_training ─┬─ gate      1.4B, 24 layers
        │                                                └─ sft
        └─ the same, upcycled to 48 layers by duplication              2.6B

Prepare the sources named below under `corpora/ouro/`: `titan-loop data tokenize` with one tokenizer
of 49,152 tokens for all of them but `fineweb-edu`, the data of the two studies, which wants one of
32,000 tokens (`titan-loop data train-tokenizer --vocab-size 32000`); `:packed` sources also with
`titan-loop data pack`.

Published: tokens, window, R, β, RoPE base, batch, learning rates, AdamW, clipping, mixtures and the
two epochs of the SFT. Not published, hence ours:

- pretraining: lengths of warm-up and batch ramp, seeds (every stage draws its windows anew, so 1b
  reads some of 1a's again), the order of duplicated layers, whether the replay in mid-training
  keeps the Chinese sources (here it does not), the optimiser's state
  kept between stages;
- chats: the loss counts the assistant's turns only, in mid-training and in the SFT, and whole chats
  are packed into windows;
- the gate stage's tokens, batch and learning rate; the SFT's batch, final learning rate and weight
  decay;
- the studies: tokenizer and shapes of the models (`titan_loop/families/ouro/model.py` infers both
  from the parameter counts), window, warm-up, schedule and β. The batch is the 500K tokens that
  Appendix A must mean: it prints 50K tokens a step and 40K steps, but 20B tokens are 400K steps of
  50K. Its model of 776M is the 778M of Appendix D. It repeats every run over seeds that it does not
  name (`--debug.seed` sets one);
- how the work is spread: batches and memory are made for up to 512 GPUs of 80 GB
  (`titan-loop plan ouro_1_4b --nodes 64`).

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Tables 1-6, §3.3, §4, Appendices A and D.
"""

from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.source_card import CARD_NAME, SourceCard
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.families.ouro.model import SIZES, OuroOptions
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import run

CORPUS = "corpora/ouro"

# The paper's "4M" and "8M" are taken as powers of two, so that every window length divides them.
BATCH_4M, BATCH_8M = 2**22, 2**23
BILLION, TRILLION = 10**9, 10**12

WARMUP_TOKENS = 8 * BILLION  # ours: about 2,000 steps
RAMP_TOKENS = 100 * BILLION  # ours: linear

# Percent of tokens, Table 4.
STAGE_1 = {
    "nemotron-cc": 73.4,
    "map-cc": 13.0,
    "ultra-fineweb-zh": 2.0,
    "opencoder-pretrain": 7.5,
    "megamath-web": 4.1,
}
CHINESE = ("map-cc", "ultra-fineweb-zh")  # stop after stage 1
# Table 5.
STAGE_2 = {
    "nemotron-cc-high-quality": 66.5,
    "nemotron-cc-math-v1": 15.0,
    "megamath-high-quality": 4.6,
    "opc-annealing-corpus": 0.5,
    "nemotron-synthetic-code": 3.8,
    "nemotron-sft-code": 3.4,
    "nemotron-sft-general": 6.2,
}
# Billions of tokens, §4.2 "Stage 4"; the SFT mix is ChatML.
MID_TRAINING_SFT, REPLAY_OF_STAGE_1, REPLAY_OF_STAGE_2 = 90, 30, 180
# Reasoning SFT, thousands of examples, Table 6.
SFT = {"math": 3_500, "code": 3_200, "science": 808, "chat": 767}
SFT_EPOCHS = 2
SFT_TOKENS_GUESSED = 60 * BILLION  # two epochs of 8.3M examples of about 3,600 tokens

STUDY_VOCABULARY = 32_000  # with it the studies' models have the paper's parameter counts


def ouro_1_4b() -> Recipe:
    """Ouro 1.4B: 24 layers, R = 8 then 4, 7.7T tokens in five stages, then gate and SFT."""
    return Recipe(name="ouro_1_4b", stages=[_stage_1a(), *_branch("1a")])


def ouro_2_6b() -> Recipe:
    """Ouro 2.6B: the 1.4B after stage 1a, upcycled to 48 layers; the same stages from there."""
    branch = _branch("1a", size="2.6b")
    branch[0].config.checkpoint.carry.upcycle = "stacked"  # ours: keeps 48 x 4 = 24 x 8 visits
    return Recipe(name="ouro_2_6b", stages=[_stage_1a(), *branch])


def _stage_1a() -> Stage:
    config = _config(
        seed=0,
        tokens=3 * TRILLION,
        window=4096,
        learning_rate=Schedule.warmup_constant(3e-4, warmup_tokens=WARMUP_TOKENS),
        mixture=_mixture(STAGE_1),
    )
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(8))
    _recompute_some_of(config)
    config.entropy_weight = Schedule.constant(0.1)
    config.batch = BatchConfig(
        global_batch_tokens=Schedule.parse(f"0:{BATCH_4M} linear {RAMP_TOKENS}:{BATCH_8M}"),
        multiple_of_windows=BATCH_4M // 4096 // 2,  # one for each of 512 ranks; ours
    )
    return Stage(name="1a", config=config)


def _branch(parent: str, *, size: str = "1.4b") -> list[Stage]:
    """Return the stages after 1a of one of the two models."""
    annealing_tokens = 14 * TRILLION // 10
    stages = [
        Stage(
            name="1b",
            parent=parent,
            config=_config(
                seed=1,
                size=size,
                tokens=3 * TRILLION,
                window=4096,
                learning_rate=Schedule.constant(3e-4),
                mixture=_mixture(STAGE_1),
            ),
        ),
        Stage(
            name="ct_annealing",
            parent="1b",
            config=_config(
                seed=2,
                size=size,
                tokens=annealing_tokens,
                window=16_384,
                rope_theta=40_000.0,
                learning_rate=Schedule.parse(f"0:3e-4 cosine {annealing_tokens}:3e-5"),
                mixture=_mixture(STAGE_2),
            ),
        ),
        Stage(
            name="longct",
            parent="ct_annealing",
            config=_config(
                seed=3,
                size=size,
                tokens=20 * BILLION,
                window=65_536,
                context_parallel=4,
                rope_theta=1e6,
                learning_rate=Schedule.constant(3e-5),
                mixture=[f"{CORPUS}/prolong-64k=1:packed"],
            ),
        ),
        Stage(
            name="mid_training",
            parent="longct",
            config=_config(
                seed=4,
                size=size,
                tokens=300 * BILLION,
                window=32_768,
                context_parallel=2,
                rope_theta=1e6,
                learning_rate=Schedule.parse(f"0:3e-5 cosine {300 * BILLION}:1e-5"),
                mixture=_mid_training_mixture(),
            ),
        ),
    ]
    if size == "2.6b":
        _recompute_some_of(stages[0].config)
    return [*stages, _gate(size), _reasoning_sft(size)]


def _gate(size: str) -> Stage:
    """Stage II: the language model is frozen, the gate learns when another step still helps."""
    config = _config(
        seed=5,
        size=size,
        tokens=2 * BILLION,  # ours
        window=32_768,
        context_parallel=2,
        rope_theta=1e6,
        learning_rate=Schedule.constant(3e-4),  # ours
        mixture=_mid_training_mixture(),
    )
    config.trainable = "exit_gate"
    config.loss = AdaptiveGateLoss.Config()
    config.checkpoint.carry.optimizer = False
    return Stage(name="gate", parent="mid_training", config=config)


def _reasoning_sft(size: str) -> Stage:
    """Two epochs of every chat, from the mid-trained model."""
    window = 32_768
    mixture, tokens = _equal_epochs(SFT, SFT_EPOCHS, window=window, batch_tokens=BATCH_4M)
    config = _config(
        seed=6,
        size=size,
        tokens=tokens,
        window=window,
        context_parallel=4,
        rope_theta=1e6,
        learning_rate=Schedule.parse(f"0:2e-5 cosine {tokens}:0"),  # final value: ours
        mixture=mixture,
        epochs=SFT_EPOCHS,
    )
    config.batch = BatchConfig(global_batch_tokens=Schedule.constant(BATCH_4M))  # ours
    config.checkpoint.carry.optimizer = False  # ours
    return Stage(name="sft", parent="mid_training", config=config)


def _equal_epochs(
    examples: dict[str, int], epochs: int, *, window: int, batch_tokens: int
) -> tuple[list[str], int]:
    """Return a mixture of packed sources in proportion to their sizes, and the tokens of the run.

    The run has the whole batches in `epochs` epochs of all sources; less than one batch is left
    over. Before all sources are packed, numbers of examples stand in for sizes and
    `SFT_TOKENS_GUESSED` for the tokens.
    """
    folders = {name: f"{CORPUS}/sft-{name}" for name in examples}
    sizes = {name: _packed_windows(Path(folder), window) for name, folder in folders.items()}
    tokens = SFT_TOKENS_GUESSED
    if all(sizes.values()):
        available = epochs * sum(sizes.values()) * window
        tokens = max(available // batch_tokens, 1) * batch_tokens
    else:
        sizes = examples
    return [f"{folder}={sizes[name]}:packed" for name, folder in folders.items()], tokens


def _packed_windows(source: Path, window: int) -> int:
    """Return the packed windows of a source's training split; 0 before it is packed."""
    if not (source / CARD_NAME).exists():
        return 0
    packed = SourceCard.read(source).splits["train"].packed_for(window)
    return 0 if packed is None else packed.windows


def _config(
    *,
    seed: int,
    tokens: int,
    window: int,
    learning_rate: Schedule,
    mixture: list[str],
    size: str = "1.4b",
    rope_theta: float = 10_000.0,
    context_parallel: int = 1,
    epochs: int | None = None,
) -> LoopTrainer.Config:
    """Return the common settings of all stages: R = 4, β = 0.05, 8M tokens a batch, AdamW.

    Every stage has its own seed; otherwise it would repeat its parent's windows in the same order.
    With `epochs`, a source leaves the mixture after that many and the others continue.
    """
    config = run(
        OuroOptions(size=size, rope_theta=rope_theta),
        WindowLoader.Config(
            mixture=mixture,
            seed=seed,
            max_epochs=epochs,
            when_exhausted="stop" if epochs is None else "renormalise",
        ),
        tokens=tokens,
        window=window,
        windows=BATCH_8M // window,
        at_once=1,
        rate=learning_rate,
        steps=4,
        entropy_weight=Schedule.constant(0.05),
        adamw=AdamWConfig(weight_decay=0.1, beta1=0.9, beta2=0.95),
        held_out=HeldOutConfig(interval=1000, depths=[1, 2, 4, 8], windows=64),
        save_every=1000,
        max_norm=1.0,
    )
    config.parallelism.context_parallel_degree = context_parallel
    if window > 4096:
        config.activation_checkpoint = FullAC.Config()
    config.checkpoint.keep_latest_k = 3
    config.checkpoint.keep_every = 25_000
    config.checkpoint.async_mode = "async_with_pinned_mem"
    return config


def _recompute_some_of(config: LoopTrainer.Config) -> None:
    """Checkpoint selectively, because 192 layer visits of width 2,048 keep 63 GiB for a window.

    With weights and gradients that is 90 to 98 % of the usable part of 80 GB, and the estimate may
    be 13 % off (`titan_loop/distributed/README.md`). Selective checkpointing needs 38 to 63 %.
    """
    config.activation_checkpoint = SelectiveAC.Config()


def _mixture(weights: dict[str, float], share: float = 1.0) -> list[str]:
    total = sum(weights.values())
    return [f"{CORPUS}/{name}={share * weight / total:.6g}" for name, weight in weights.items()]


def _mid_training_mixture() -> list[str]:
    replay = {name: weight for name, weight in STAGE_1.items() if name not in CHINESE}  # ours
    return [
        f"{CORPUS}/mid-training-sft={MID_TRAINING_SFT}:packed",
        *_mixture(replay, REPLAY_OF_STAGE_1),
        *_mixture(STAGE_2, REPLAY_OF_STAGE_2),
    ]


def ouro_scaling_study() -> Recipe:
    """Appendix D: 53M to 1.36B at R = 1, 2, 4, 8 on 20B tokens, and standard models as deep.

    Laws are fitted to R = 2, 4 and 8 of the looped models alone; the others are controls.
    """
    stages: list[Stage] = []
    for size in ("53m", "134m", "374m", "778m", "1.4b"):
        for steps in (1, 2, 4, 8):
            name, config = f"{size}-r{steps}", _study(size, steps)
            stages.append(Stage(name=name, config=config, control=steps == 1))
        for steps in (2, 4, 8):  # the paper's standard model "at R"; at R = 1 it is SIZE-r1
            config = _study(size, 1)
            config.model.n_layers = steps * SIZES[size].n_layers
            config.held_out.depths = [1]
            stages.append(Stage(name=f"{size}-standard{steps}", config=config, control=True))
    for stage in stages:
        if stage.name in ("1.4b-r8", "1.4b-standard8"):
            _recompute_some_of(stage.config)
    return Recipe(name="ouro_scaling_study", stages=stages)


def ouro_prior_ablation() -> Recipe:
    """Appendix A: a uniform prior against geometric ones, 778M, R = 4, 20B tokens.

    Compare the runs by `loss`. It is Σ_r p_r CE_r + β (KL(p ‖ π) − log R) under every prior π;
    if π is uniform, that is Σ_r p_r CE_r − β H(p).
    """
    stages = [Stage(name="uniform", config=_study("778m", 4))]
    for tenths in range(1, 10):
        config = _study("778m", 4)
        config.loss = ExpectedExitLoss.Config(prior="geometric", geometric_eta=tenths / 10)
        stages.append(Stage(name=f"geometric-0.{tenths}", config=config))
    return Recipe(name="ouro_prior_ablation", stages=stages)


def _study(size: str, recurrent_steps: int) -> LoopTrainer.Config:
    """Return one run of the studies."""
    tokens = 20 * BILLION
    config = _config(
        seed=0,
        size=size,
        tokens=tokens,
        window=4096,
        learning_rate=Schedule.warmup_cosine(
            3e-4, warmup_tokens=tokens // 100, total_tokens=tokens, final=3e-5
        ),
        mixture=[f"{CORPUS}/fineweb-edu=1"],
    )
    config.model.vocab_size = STUDY_VOCABULARY
    config.model.recurrent_steps = recurrent_steps
    config.model.exit_gate = recurrent_steps > 1
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(recurrent_steps))
    config.batch = BatchConfig(global_batch_tokens=Schedule.constant(2**19))
    return config
