"""The bridge in the state, question by question, and in the input of the next step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.task_run import TASK, random_model, write_task_run
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR
from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.families.ouro.model import OuroOptions
from train_configs.discoloop.bridge import bridge_states

STEPS, COUNT, STRATUM = 3, 12, "3_hops"
MODELS = {
    "plain": OuroOptions(),
    "readout": OuroOptions(norm_placement="readout", tie_weights=True),
    "readout by step": OuroOptions(readout_rank=2),
    "discoloop": DiscoLoopOptions(channel_strength=2.0),
}


def cosine(state: torch.Tensor, row: torch.Tensor) -> float:
    return float(state @ row / state.norm() / row.norm())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_probability_and_cosines_are_those_of_every_question_alone(name):
    model = random_model(MODELS[name])
    found = bridge_states(model, TASK, STRATUM, steps=STEPS, count=COUNT)
    drawn = TASK.held_out_questions(2 * COUNT, TASK.strata[STRATUM])
    questions = [*{TASK.identity(question): question for question in drawn}.values()][:COUNT]
    wanted = np.zeros((3, STEPS, COUNT))
    table = model.tok_embeddings.weight
    for index, question in enumerate(questions):
        tokens = torch.tensor([TASK.encode(question).tokens[:-1].tolist()])
        bridge, context = TASK.reached(question)[0], model.make_context(tokens)
        state = model.tok_embeddings(tokens)
        for step in range(STEPS):
            for layer in model.layers.values():
                state = layer(state, context)
            read = model.norm(state)
            state = read if model.norm_placement == "every_step" else state
            if name == "readout by step":
                read = model.step_readout(read, step=step + 1)
            probability = (read[0, 1] @ model.lm_head.weight.T).softmax(-1)[bridge]
            wanted[0, step, index] = float(probability)
            wanted[1, step, index] = cosine(state[0, 1], table[bridge])
            if name == "discoloop":
                mixed = (read @ table.T).softmax(-1) @ table
                state = state + 2.0 * model.channel.norm(mixed)
            wanted[2, step, index] = cosine(state[0, 1], table[bridge])
    probability, cosines, entering = wanted.mean(-1)
    np.testing.assert_allclose(found.probability, probability, atol=1e-6)
    np.testing.assert_allclose(found.cosine, cosines, atol=1e-6)
    np.testing.assert_allclose(found.entering, entering[:-1], atol=1e-6)
    same = np.allclose(found.entering, found.cosine[:-1])
    assert same == (name != "discoloop")


def test_the_verb_leaves_a_record_and_a_plot(tmp_path: Path, capsys):
    run = write_task_run(tmp_path / "run", OuroOptions())
    words = ["analyse", "bridge", str(run), "--questions", "8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "2_hops" in said
    assert "1_hops" not in said  # nothing but the target
    record = json.loads((run / "evals" / "bridge-step-3.json").read_text())
    results = record["results"]
    assert 0 <= results["hops/2_hops/bridge_probability/static:3"] <= 1
    assert "hops/2_hops/bridge_entering/static:2" in results
    assert "hops/2_hops/bridge_entering/static:3" not in results
    assert (run / "plots" / "bridge.png").is_file()
    assert main([*words, "--strata", "9_hops"]) == EXIT_USER_ERROR
    assert "strata=9_hops: hops has none" in capsys.readouterr().err
