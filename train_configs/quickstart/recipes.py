"""The quick start: one looped layer on code, prose and mathematics, and one on arithmetic; R = 4.

`bash tools/quickstart.sh` builds the corpus and runs the recipes. README.md has the
measurements on two cores that shape, tokens, vocabulary, batch and task were chosen by.
"""

from dataclasses import replace
from typing import NamedTuple

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import SOURCES, at, bits_table, by_source, by_steps, cosine, recipe_of, run, text
from .chained_arithmetic import ChainedArithmetic

QUICK_TOKENS = 3_000_000
ARITHMETIC = ChainedArithmetic(modulus=5, max_operations=4)
ARITHMETIC_TOKENS = 1_000_000


class Candidate(NamedTuple):
    """A layer and its tokens; all candidates cost about as much as the quick start.

    Attributes:
        tokens: Tokens to train on.
        steps: R against tokens.
        final_rate: Learning rate at the end.
        optimizer: Its name.
        exit_gate: Whether it learns after which step to stop, from the loss of every step;
            otherwise only the last step has a loss.
        dim: D.
        hidden_dim: F.
    """

    tokens: int
    steps: Schedule = Schedule.constant(4)
    final_rate: float = 1e-3
    optimizer: str = "adamw"
    exit_gate: bool = True
    dim: int = 96
    hidden_dim: int = 256


def _grown(second: int, fourth: int) -> Schedule:
    """Return R = 1, 2 from `second` tokens and 4 from `fourth`."""
    return Schedule.steps([(0, 1), (second, 2), (fourth, 4)])


# A step of one thread takes about (12 + 32·R) ms at D 96; tokens make its sum over a run equal.
CANDIDATES = {
    "d96_r4": Candidate(3_000_000),
    "d96_grown_to_0": Candidate(5_200_000, _grown(1_800_000, 3_600_000), 1e-4),
    "d96_to_0": Candidate(3_000_000, final_rate=1e-4),
    "d96_muon": Candidate(2_800_000, optimizer="muon"),
    "d96_muon_last": Candidate(3_400_000, final_rate=1e-4, optimizer="muon", exit_gate=False),
    "d96_muon_last_grown": Candidate(
        5_000_000, _grown(1_000_000, 2_500_000), 1e-4, "muon", exit_gate=False
    ),
    "d128_muon_last": Candidate(
        2_400_000, final_rate=1e-4, optimizer="muon", exit_gate=False, dim=128, hidden_dim=384
    ),
}

TABLES = {
    "quickstart": [
        bits_table(
            "bits_per_byte",
            "held-out bits per byte",
            by_steps(range(1, 7)),
            by_source((*SOURCES, "all")),
            everywhere={"stage": "quickstart"},
        )
    ],
    "quickstart_search": [
        bits_table(
            "bits",
            "held-out bits per byte",
            {
                f"{name} R={r}": at(name, r)
                for name in CANDIDATES
                for r in (1, round(CANDIDATES[name].steps.largest))
            },
            by_source(),
        )
    ],
    "quickstart_arithmetic": [
        ResultTable(
            name="accuracy",
            title="% right of four operations",
            rows={
                **{f"four visits, read after {r}": at("looped", r) for r in (1, 2, 3, 4)},
                "one visit, four times the tokens": at("not_looped", 1),
                "at half the learning rate": at("not_looped_5e-3", 1),
            },
            columns={"right": {"task": ARITHMETIC.name, "metric": "acc,none"}},
        )
    ],
}


def quickstart() -> LoopTrainer.Config:
    """One looped layer of 0.3 M parameters on code, prose and mathematics; minutes on a CPU.

    It is the best candidate, on as many tokens as five minutes pay for, but with three heads of 32
    in place of four of 24: they train faster, and llama.cpp's quantised caches and vLLM's CPU
    kernels lack heads of 24. Only its last step has a loss: README.md measures the cost of an exit
    gate for a single layer.
    """
    config = _config("d96_muon_last", "runs/quickstart", tokens=QUICK_TOKENS)
    config.model = replace(config.model, n_heads=3)
    return config


def quickstart_search() -> Recipe:
    """Shapes, depths, schedules and optimisers at the quick start's cost."""
    stages = [Stage(name=name, config=_config(name)) for name in CANDIDATES]
    for stage in stages:
        stage.config.held_out = HeldOutConfig(depths=[1, 2, 4], windows=128)
        stage.config.checkpoint.interval = 2000
    return Recipe(name="quickstart_search", stages=stages)


def quickstart_arithmetic() -> Recipe:
    """Arithmetic of four operations: a layer visited four times, and once on four times the tokens.

    Both cost the same training FLOPs, within 2 %; each takes a minute or two on a CPU.
    """
    more = 4 * ARITHMETIC_TOKENS
    return recipe_of(
        "quickstart_arithmetic",
        {
            "looped": _arithmetic(4, ARITHMETIC_TOKENS),
            "not_looped": _arithmetic(1, more),
            "not_looped_5e-3": _arithmetic(1, more, 5e-3),
        },
    )


def _arithmetic(steps: int, tokens: int, rate: float = 1e-2) -> LoopTrainer.Config:
    return run(
        OuroOptions(
            size="debugmodel", n_layers=1, hidden_dim=128, recurrent_steps=steps, exit_gate=False
        ),
        TaskLoader.Config(task=ARITHMETIC),
        tokens=tokens,
        window=64,
        windows=16,
        rate=cosine(rate, tokens, warmup=100_000),
        steps=steps,
        adamw=AdamWConfig(beta2=0.98, eps=1e-6),
        suite=SuiteConfig(
            interval=100_000,  # at the end alone
            tasks=[ARITHMETIC.name],
            depths=[*range(1, steps + 1)],
            questions=1_000,
        ),
        save_every=100_000,
        log_every=50,
        optimizer="muon",
    )


def _config(name: str, folder: str = "", tokens: int | None = None) -> LoopTrainer.Config:
    candidate = CANDIDATES[name]
    tokens = tokens or candidate.tokens
    config = run(
        OuroOptions(
            size="quickstart",
            n_layers=1,
            dim=candidate.dim,
            hidden_dim=candidate.hidden_dim,
            exit_gate=candidate.exit_gate,
        ),
        text(),
        tokens=tokens,
        window=256,
        windows=4,
        rate=Schedule.warmup_cosine(
            1e-2,
            start=1e-3,
            warmup_tokens=150_000,
            total_tokens=tokens,
            final=candidate.final_rate,
        ),
        steps=candidate.steps,
        dump_folder=folder,
        entropy_weight=Schedule.constant(0.1),
        held_out=HeldOutConfig(interval=600, depths=[1, 2, 4, 6], windows=16),
        save_every=600,
        optimizer=candidate.optimizer,
    )
    config.metrics.enable_tensorboard = True
    return config
