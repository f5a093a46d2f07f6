"""SmolLM2-135M, dense and made to loop, learns to compose rules in English.

`retrofit_rules` teaches facts and questions of two and three hops, in English, to the dense model
and to loops; the exam asks up to six hops (`bash tools/retrofit.sh --rules`). Arms see the same
tokens; `identity` and `plain` draw R with a mean that grows from 1 to 3.

The module bears the name of the family whose task it trains, and is deleted with that family.
LOG.md has the results.
"""

from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.recurrent_depth.english_hops import EnglishHops
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.retrofit import FOLDER, SMOLLM2_ROWS, _smollm2

RULES_TOKENS = 49_152
RULES = EnglishHops(tokenizer=f"{FOLDER}/smollm2/tokenizer.json")
RULES_WINDOW_TOKENS = 128
RULES_DEPTHS = (1, 2, 3, 4, 6, 8)
"""R of the exam; the dense model is asked at R = 1."""

RULES_TABLE = ResultTable(
    name="rules",
    title="% of questions right; 2 and 3 hops were taught",
    rows={
        "source": {"stage": "source", "reading": "static:1"},
        **{
            f"{arm}, R = {steps}": {"stage": arm, "reading": f"static:{steps}"}
            for arm in ("identity", "plain")
            for steps in RULES_DEPTHS
        },
    },
    columns={
        str(hops): {"task": f"{RULES.name}/{hops}_hops"} for hops in range(1, RULES.asked_hops + 1)
    },
    everywhere={"metric": "acc,none"},
    columns_are="hops",
)

TABLES = {"retrofit_rules": [RULES_TABLE]}


def retrofit_rules() -> Recipe:
    """SmolLM2-135M and loops made of it learn to compose rules, on one core."""
    arms = {"source": None, "identity": "identity", "plain": "plain"}
    return Recipe(
        name="retrofit_rules",
        stages=[Stage(name=name, config=_rules(start)) for name, start in arms.items()],
    )


def _rules(start: str | None) -> LoopTrainer.Config:
    """Return the arm of one of `retrofit.STARTS`, or of the dense model."""
    grown = RecurrenceConfig(
        steps=Schedule.parse(f"0:1 linear {RULES_TOKENS // 2}:3"),
        poisson=True,
        lognormal_sigma=0.5,
        max_steps=4,
    )
    options: dict[str, Any] = {"new_rate_factor": 10.0} if start == "identity" else {}
    config = _smollm2(start=start, recurrence=grown if start else None, rate=2e-4, **options)
    config.total_tokens = RULES_TOKENS
    config.model.vocab_size = SMOLLM2_ROWS
    config.dataloader = TaskLoader.Config(task=RULES)
    config.learning_rate = Schedule.warmup_cosine(
        2e-4, warmup_tokens=RULES_TOKENS // 20, total_tokens=RULES_TOKENS, final=2e-5
    )
    config.batch.global_batch_tokens = Schedule.constant(2 * RULES_WINDOW_TOKENS)
    config.training.seq_len = RULES_WINDOW_TOKENS
    config.suite = SuiteConfig(
        interval=RULES_TOKENS,  # once, after the last step
        tasks=[RULES.name],
        depths=list(RULES_DEPTHS) if start else [1],
        questions=48,
    )
    return config
