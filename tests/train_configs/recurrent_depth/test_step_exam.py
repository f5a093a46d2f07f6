"""The exam after every step against separate passes, question by question."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.task_run import MODELS, TASK, random_model, write_task_run
from titan_loop.cli.main import main
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl
from train_configs.recurrent_depth.permutation_hops import PermutationHops
from train_configs.recurrent_depth.step_exam import step_exam, updates_to_learn

STEPS, COUNT = 5, 9


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
def test_steps_are_graded_question_by_question(model):
    found = step_exam(model, TASK, ["2_hops", "4_hops"], steps=STEPS, count=COUNT)
    assert list(found) == ["2_hops", "4_hops"]
    for name, exam in found.items():
        margins = np.zeros((COUNT, STEPS))
        for row, (prompt, answer) in enumerate(asked(name)):
            states = model(torch.tensor([prompt]), recurrent_steps=STEPS).hidden_RBLD
            logits = [model.readout(state)[0, -1] for state in states]
            margins[row] = [margin(x, answer) for x in logits]
        assert exam.accuracy == pytest.approx((margins > 0).mean(0))
        hits = [1 + int((row > 0).argmax()) for row in margins if (row > 0).any()]
        assert exam.first_hits.share == len(hits) / COUNT
        if hits:
            assert exam.first_hits.median == sorted(hits)[(len(hits) - 1) // 2]


def test_the_last_exam_of_a_passed_level_counts(tmp_path: Path):
    run = RunDirectory(tmp_path)
    for step, hops, asked in ((2, 2, "promotion"), (4, 2, "promotion"), (5, 3, "training"),
                              (6, 3, "promotion"), (8, 4, "promotion")):  # fmt: skip
        results = {f"hops/{hops}_hops/acc,none/static:1": 1.0}
        record = {"step": step, "asked": asked, "results": results, "tokens": step}
        append_jsonl(run.evals_jsonl, record)
    assert updates_to_learn(run, PermutationHops(), 2) == {"2_hops": 4, "3_hops": 6}


def test_the_verb_leaves_a_record_and_a_plot(tmp_path: Path, capsys):
    run = write_task_run(tmp_path / "run", OuroOptions(exit_gate=False))
    words = ["analyse", "steps", str(run), "--questions", "8"]
    assert main([*words, "--recurrent-steps", "4"]) == 0
    assert "0.000" in capsys.readouterr().out
    record = json.loads((run / "evals" / "steps-step-3.json").read_text())
    assert list(record["strata"]) == [f"{hops}_hops" for hops in range(1, 6)]
    assert len(record["strata"]["2_hops"]["accuracy"]) == 4
    assert main([*words, "--strata", "1_hops"]) == 0  # R is twice the trained 3
    record = json.loads((run / "evals" / "steps-step-3.json").read_text())
    assert len(record["strata"]["1_hops"]["accuracy"]) == 6
    assert [path.name for path in (run / "plots").iterdir()] == ["step-accuracy.png"]
