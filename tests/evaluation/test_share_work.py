"""Two ranks evaluate what one process evaluates, and an error on one is an error on both."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from titan_loop.errors import UserError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.share_work import share_work
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.task_report import TaskReport

pytestmark = pytest.mark.multiprocess


def evaluate(run: str) -> TaskReport:
    from titan_loop.evaluation.harness_model import LoopLM

    options = TaskOptions(tasks=("held_out", "mmlu_dev"), windows=3, depths=(1, 3), limit=3)
    report = evaluate_tasks(run, options)
    lm = LoopLM(run, recurrent_steps=2, batch_size=2)
    asked = [
        SimpleNamespace(task_name="a", args=(p, {"max_gen_toks": 5}))
        for p in ("a", "def f(", "x", "import")
    ]
    report.failures["texts"] = "|".join(lm.generate_until(asked))
    return report


def test_two_ranks_equal_one(gloo_pool, text_run: Path):
    alone = evaluate(str(text_run))
    assert alone.tasks
    for report in gloo_pool(2).run(evaluate, str(text_run)):
        assert report.failures == alone.failures
        # Rows stand in other batches, whose sums are rounded differently.
        assert report.flat() == pytest.approx(alone.flat(), rel=1e-5)


def work_and_fail(kind: str) -> str:
    def work(share):
        if dist.get_rank() == 1:
            raise UserError("wrong") if kind == "user" else ValueError("broken")
        return list(share)

    assert share_work(range(5), list) == [0, 1, 2, 3, 4]
    assert share_work([7], list) == [7]  # rank 1 has nothing to do
    with pytest.raises((UserError, RuntimeError, ValueError)) as raised:
        share_work(range(5), work)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_an_error_on_one_rank_reaches_all(gloo_pool):
    assert gloo_pool(2).run(work_and_fail, "user") == ["UserError: wrong"] * 2
    ours, theirs = gloo_pool(2).run(work_and_fail, "defect")
    assert (ours, theirs) == ("RuntimeError: rank 1: ValueError: broken", "ValueError: broken")
