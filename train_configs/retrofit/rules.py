"""SmolLM2-135M, dense and made to loop, learns to compose rules in English.

    retrofit_rules    facts of one graph by heart, and questions of two and three hops
    retrofit_told     facts of a new graph in every prompt, and questions of one to three hops

The exams ask up to six hops (`bash tools/retrofit.sh --rules`, `--told`). Arms see the same tokens;
`identity` and `plain` draw R with a mean that grows from 1 to 3.

The module bears the name of the family whose task it trains, and is deleted with that family.
README.md has the results of `retrofit_rules`; `retrofit_told` has not been trained.
"""

from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, cosine
from .english_hops import EnglishHops, ToldHops
from .recipes import FOLDER, SMOLLM2_ROWS, _arm

TOKENIZER = f"{FOLDER}/smollm2/tokenizer.json"
RULES, RULES_TOKENS, RULES_WINDOW_TOKENS = EnglishHops(tokenizer=TOKENIZER), 49_152, 128
TOLD, TOLD_TOKENS, TOLD_WINDOW_TOKENS = ToldHops(tokenizer=TOKENIZER), 147_456, 256
DEPTHS = (1, 2, 3, 4, 6, 8)
"""R of the exam; the dense model is asked at R = 1."""

ARMS = {"source": None, "identity": "identity", "plain": "plain"}
"""Name → one of `retrofit.STARTS`; None for the dense model."""


def _table(task: EnglishHops | ToldHops, taught: str) -> ResultTable:
    return ResultTable(
        name="rules",
        title=f"% of questions right; {taught} hops were taught",
        rows={
            "source": at("source", 1),
            **{
                f"{arm}, R = {steps}": at(arm, steps)
                for arm in ("identity", "plain")
                for steps in DEPTHS
            },
        },
        columns={
            str(hops): {"task": f"{task.name}/{hops}_hops"}
            for hops in range(1, task.asked_hops + 1)
        },
        everywhere={"metric": "acc,none"},
        columns_are="hops",
    )


TABLES = {
    "retrofit_rules": [_table(RULES, "2 and 3")],
    "retrofit_told": [_table(TOLD, "1 to 3")],
}


def retrofit_rules() -> Recipe:
    """SmolLM2-135M and loops made of it learn facts by heart and compose them, on one core."""
    return _recipe("retrofit_rules", RULES, RULES_TOKENS, RULES_WINDOW_TOKENS)


def retrofit_told() -> Recipe:
    """SmolLM2-135M and loops made of it compose facts that the prompt tells, on one core."""
    return _recipe("retrofit_told", TOLD, TOLD_TOKENS, TOLD_WINDOW_TOKENS)


def _recipe(name: str, task: EnglishHops | ToldHops, tokens: int, window: int) -> Recipe:
    stages = [
        Stage(name=arm, config=_rules(start, task, tokens, window)) for arm, start in ARMS.items()
    ]
    return Recipe(name=name, stages=stages)


def _rules(
    start: str | None, task: EnglishHops | ToldHops, tokens: int, window: int
) -> LoopTrainer.Config:
    """Return the arm of one of `retrofit.STARTS`, or of the dense model."""
    grown = RecurrenceConfig(
        steps=Schedule.parse(f"0:1 linear {tokens // 2}:3"),
        poisson=True,
        lognormal_sigma=0.5,
        max_steps=4,
    )
    options: dict[str, Any] = {"new_rate_factor": 10.0} if start == "identity" else {}
    config = _arm(start=start, recurrence=grown if start else None, rate=2e-4, **options)
    config.total_tokens = tokens
    config.model.vocab_size = SMOLLM2_ROWS
    config.dataloader = TaskLoader.Config(task=task)
    config.learning_rate = cosine(2e-4, tokens)
    config.batch.global_batch_tokens = Schedule.constant(2 * window)
    config.training.seq_len = window
    config.suite = SuiteConfig(
        interval=tokens,  # once, after the last step
        tasks=[task.name],
        depths=list(DEPTHS) if start else [1],
        questions=48,
    )
    return config
