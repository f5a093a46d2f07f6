"""Activation patching against passes that are written out layer by layer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.task_run import MODELS, TASK, WINDOW, random_model, walk, write_task_run
from titan_loop.analysis.steps.patching import patching
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request) -> LoopDecoder:
    return random_model(request.param)


def margin(logits: torch.Tensor, answer: int) -> float:
    return float(logits[answer]) - max(float(x) for i, x in enumerate(logits) if i != answer)


@torch.no_grad()
def test_a_patch_is_the_other_questions_state_at_one_place(model):
    visits, change = patching(model, TASK, "3_hops", steps=2, count=4)
    assert visits == [(0, 0), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert change.shape == (5, 4)
    questions = TASK.held_out_questions(4, TASK.strata["3_hops"])
    pairs = [TASK.encode(q).tokens.tolist() for q in questions]

    def run(tokens, at=None, position=None, other=None):
        """Return logits of the last position and the states at all visits."""
        states = {}

        def visited(visit, state):
            if visit == at:
                state = state.clone()
                state[0, position] = other[0, position]
            states[visit] = state
            return state

        read = walk(model, torch.tensor([tokens[:-1]]), 2, visited)
        return model.lm_head(read)[0, -1], states

    passes = [run(tokens) for tokens in pairs]
    for row, visit in enumerate(visits):
        for position in range(4):
            changes = []
            for number, tokens in enumerate(pairs):
                (clean, _), (_, others) = passes[number], passes[(number + 1) % 4]
                patched, _ = run(tokens, visit, position, others[visit])
                changes.append(margin(patched, tokens[-1]) - margin(clean, tokens[-1]))
            assert change[row, position] == pytest.approx(np.mean(changes), abs=1e-9)


def test_the_verb_leaves_a_record_and_a_plot(tmp_path: Path, capsys):
    run = write_task_run(tmp_path / "run", OuroOptions(exit_gate=False))
    assert main(["analyse", "patching", str(run), "--questions", "3"]) == 0
    assert "5_hops: the margin falls most" in capsys.readouterr().out
    record = json.loads((run / "evals" / "patching-step-3.json").read_text())
    assert np.shape(record["change"]) == (1 + 3 * 2, WINDOW)
    assert (run / "plots" / "patching.png").is_file()
    assert main(["analyse", "patching", str(run), "--questions", "1"]) == EXIT_USER_ERROR
    assert "questions=1 must be at least 2" in capsys.readouterr().err
