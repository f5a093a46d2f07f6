"""The exam after every step against separate passes; learned and reached strata."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.task_run import MODELS, TASK, random_model, write_task_run
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from train_configs.recurrent_depth.first_hits import first_hits
from train_configs.recurrent_depth.permutation_hops import PermutationHops
from train_configs.recurrent_depth.step_exam import (
    StepExam,
    passed_in_training,
    reach,
    step_exam,
)

STEPS, COUNT = 5, 9
KL_NATS, ENTROPY_NATS = 0.1, 2.6
NO_HITS = first_hits(np.zeros((1, 1), dtype=bool))


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request) -> LoopDecoder:
    return random_model(request.param)


def asked(stratum: str) -> list[tuple[list[int], int]]:
    questions = TASK.held_out_questions(COUNT, TASK.strata[stratum])
    examples = [TASK.encode(question).tokens.tolist() for question in questions]
    return [(tokens[:-1], tokens[-1]) for tokens in examples]


def margin(logits: torch.Tensor, answer: int) -> float:
    return float(logits[answer]) - max(float(x) for i, x in enumerate(logits) if i != answer)


@torch.no_grad()
def test_steps_are_graded_and_halted_question_by_question(model):
    policy = f"kl:{KL_NATS},{ENTROPY_NATS}"
    found = step_exam(
        model, TASK, ["2_hops", "4_hops"], steps=STEPS, count=COUNT, policies=[policy]
    )
    assert list(found) == ["2_hops", "4_hops"]
    for name, exam in found.items():
        margins, halted, right = np.zeros((COUNT, STEPS)), [], []
        for row, (prompt, answer) in enumerate(asked(name)):
            states = model(torch.tensor([prompt]), recurrent_steps=STEPS).hidden_RBLD
            logits = [model.readout(state)[0, -1] for state in states]
            margins[row] = [margin(x, answer) for x in logits]
            logs = [x.log_softmax(-1) for x in logits]
            step = STEPS
            for r in range(STEPS, 1, -1):
                p = logs[r - 1].exp()
                kl, entropy = p @ (logs[r - 1] - logs[r - 2]), -(p @ logs[r - 1])
                if kl < KL_NATS and entropy < ENTROPY_NATS:
                    step = r
            halted.append(step)
            right.append(margins[row, step - 1] > 0)
        np.testing.assert_allclose(exam.margin, margins.mean(0), atol=1e-9)
        assert exam.accuracy == pytest.approx((margins > 0).mean(0))
        assert exam.halting[policy].mean_steps == pytest.approx(np.mean(halted))
        assert exam.halting[policy].accuracy == pytest.approx(np.mean(right))
        assert min(halted) < STEPS
        hits = [1 + int((row > 0).argmax()) for row in margins if (row > 0).any()]
        assert exam.first_hits.share == len(hits) / COUNT
        if hits:
            assert exam.first_hits.median == sorted(hits)[(len(hits) - 1) // 2]


def test_learned_within_the_trained_steps_and_reached_with_more():
    def exam(*accuracy: float) -> StepExam:
        return StepExam(np.array(accuracy), np.zeros(len(accuracy)), {}, NO_HITS)

    found = [
        exam(1, 1, 1),
        exam(0.2, 0.96, 0.9),
        exam(0, 0.3, 0.7),
        exam(0, 0.59, 0.5),
        exam(1, 1, 1),
    ]
    assert reach(found, 2).learned == 2
    assert reach(found, 1).learned == 1
    assert reach(found, 2).reached == 3
    assert reach(found, 2).ratio == 1.5
    assert np.isnan(reach(found[2:], 2).ratio)


def test_the_paper_counts_as_learned_what_was_passed_in_training():
    """From a made-up record: the curriculum passed 2, 3 and 4 hops, and 3 are forgotten since."""
    task = PermutationHops(entities=12, relations=6, hops=6, asked_hops=8)
    state = {"windows_consumed": 99, "promotions": [3, 9, 20]}
    assert passed_in_training(task, state) == 4
    assert passed_in_training(task, {"promotions": []}) == 0
    assert passed_in_training(task, {"windows_consumed": 99}) is None
    found = [
        StepExam(np.array([share]), np.zeros(1), {}, NO_HITS)
        for share in (1, 0.96, 0.9, 0.97, 0.7, 0.6, 0)
    ]
    far = reach(found, 1, passed_in_training(task, state))
    assert (far.learned, far.passed, far.reached) == (2, 4, 6)
    assert (far.ratio, far.paper_ratio) == (3, 1.5)
    assert far.lines() == [
        "passed in training 4, reached 6: the paper's ratio 1.50",
        "learned 2, reached 6: generalisation ratio 3.00",
    ]
    assert len(reach(found, 1).lines()) == 1
    assert np.isnan(reach(found, 1, 0).paper_ratio)


def test_the_verbs_leave_records_and_plots(tmp_path: Path, capsys):
    run = write_task_run(tmp_path / "run", OuroOptions(exit_gate=False))
    words = ["analyse", "steps", str(run), "--questions", "8"]
    assert main([*words, "--exit", "kl:0.5,2", "kl:0.5,inf", "--recurrent-steps", "4"]) == 0
    assert "learned 0, reached 0: generalisation ratio nan" in capsys.readouterr().out
    record = json.loads((run / "evals" / "steps-step-3.json").read_text())
    assert list(record["strata"]) == [f"{hops}_hops" for hops in range(1, 6)]
    assert len(record["strata"]["2_hops"]["accuracy"]) == 4
    assert list(record["strata"]["2_hops"]["halting"]) == ["kl:0.5,2", "kl:0.5,inf"]
    assert main([*words, "--strata", "1_hops"]) == 0  # R is twice the trained 3
    record = json.loads((run / "evals" / "steps-step-3.json").read_text())
    assert len(record["strata"]["1_hops"]["margin"]) == 6
    plots = {"step-accuracy.png", "step-margin.png", "step-halting.png"}
    assert {path.name for path in (run / "plots").iterdir()} == plots
    assert main([*words, "--exit", "q:0.5"]) == EXIT_USER_ERROR
    assert "exit=q needs an exit gate, which this model does not have" in capsys.readouterr().err
