"""Suites as lists of tasks, and tasks that a run cannot be asked while it trains."""

from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.errors import UserError
from titan_loop.evaluation import suites
from titan_loop.evaluation.suites import SuiteTask, expand_tasks, suite_names, suite_refusals

PAPERS = (SuiteTask("gsm8k", 5, "exact_match,strict"), SuiteTask("mano"))


@pytest.fixture(autouse=True)
def one_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "find", lambda kind, name: {"paper": PAPERS}.get(name))
    monkeypatch.setattr(suites, "names", lambda kind: ["paper"])


def test_a_suite_is_its_tasks_each_once():
    assert suite_names() == ["paper", "offline"]
    assert expand_tasks(["paper", "arc"]) == [
        SuiteTask("gsm8k", 5, "exact_match,strict", True),
        SuiteTask("mano", None, "acc,none", True),
        SuiteTask("arc", None, "acc,none", False),
    ]
    assert [task.name for task in expand_tasks(["offline", "paper"])] == [
        *("held_out", "mano", "multi_hop", "mmlu_dev", "gsm8k"),
    ]
    assert expand_tasks(["mano", "paper"])[0].optional is False  # named itself
    assert expand_tasks(["offline"])[0].metric == "bits_per_byte"


def test_examples_may_be_given_and_may_be_none():
    assert [task.num_fewshot for task in expand_tasks(["paper"], 0)] == [0, 0]
    assert [task.num_fewshot for task in expand_tasks(["paper"], 3)] == [3, 3]
    with pytest.raises(UserError, match="num_fewshot=-1 must be at least 0"):
        expand_tasks(["paper"], -1)
    with pytest.raises(UserError, match="no task was named; give tasks or suites: paper, offline"):
        expand_tasks([])


class Generated:
    name = "hops"

    def check_exam(self, questions: int) -> None:
        if questions > 8:
            raise UserError("hops has 8 questions")


def refusals(
    *tasks: str, interval: int = 1, questions: int = 8, generated: bool = True, sources: Any = ()
) -> list[str]:
    loader = SimpleNamespace(
        generated_task=lambda: Generated() if generated else None, source_paths=lambda: sources
    )
    suite = SimpleNamespace(enabled=interval > 0, tasks=list(tasks), questions=questions)
    config: Any = SimpleNamespace(suite=suite, dataloader=loader)
    return [str(refusal) for refusal in suite_refusals(config)]


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["hops"], {"questions": 9}, "hops has 8 questions"),
        (["hops"], {"generated": False}, "suite.tasks: hops cannot be asked while training"),
        (["hop"], {}, "suite.tasks: hop cannot be asked while training; nearest: hops"),
        (["held_out"], {"generated": False}, "suite.tasks: held_out needs a prepared source"),
        ([], {}, "no task was named"),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(tasks, options, message):
    assert refusals("hops") == refusals("nonesuch", interval=0) == []
    assert refusals("held_out", generated=False, sources=["a"]) == []
    (refusal,) = refusals(*tasks, **options)
    assert refusal.startswith(message)
