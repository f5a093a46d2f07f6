"""Logit lens: each waypoint is read where it belongs, with and without a norm every step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.task_run import MODELS, TASK, random_model, walk, write_task_run
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR
from titan_loop.inference.measures import logit_margin
from train_configs.recurrent_depth.lens import logit_lens

STEPS, COUNT = 3, 10


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_the_lens_reads_what_separate_passes_say(options):
    model = random_model(options)
    lenses = logit_lens(model, TASK, "3_hops", steps=STEPS, count=COUNT, batch_rows=4)
    assert [lens.waypoint for lens in lenses] == ["hop_1", "hop_2", "target"]
    questions = TASK.held_out_questions(COUNT, TASK.strata["3_hops"])
    margins = np.zeros((COUNT, STEPS, len(model.looped_layers()), 3))
    for row, question in enumerate(questions):
        tokens = torch.tensor([TASK.encode(question).tokens[:-1].tolist()])

        def visited(visit, state, found=margins[row], question=question):
            step, layer = visit
            if layer:
                logits = model.lm_head(model.norm(state))[0, 1:]
                for hop, entity in enumerate(TASK.reached(question)):
                    others = [float(x) for token, x in enumerate(logits[hop]) if token != entity]
                    found[step - 1, layer - 1, hop] = float(logits[hop, entity]) - max(others)
            return state

        walk(model, tokens, STEPS, visited)
    for hop, lens in enumerate(lenses):
        np.testing.assert_allclose(lens.margin, margins[..., hop].mean(0), atol=1e-9)
        assert lens.accuracy.tolist() == (margins[..., hop] > 0).mean(0).tolist()


def test_a_margin_is_the_distance_to_the_strongest_other():
    logits = torch.tensor([[1.0, 5.0, 4.5], [2.0, -1.0, 0.5]])
    assert logit_margin(logits, torch.tensor([1, 2])).tolist() == [0.5, -1.5]


def test_the_verb_leaves_a_record_and_a_plot(tmp_path: Path, capsys):
    run = write_task_run(tmp_path / "run", MODELS["outside"])  # two of four layers are looped
    words = ["analyse", "lens", str(run), "--questions", "8"]
    assert main([*words, "--strata", "2_hops", "3_hops", "--recurrent-steps", "2"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.split() == ["stratum", "waypoint", "1.1", "1.2", "2.1", "2.2"]
    record = json.loads((run / "evals" / "lens-step-3.json").read_text())
    assert [lens["waypoint"] for lens in record["strata"]] == [
        "hop_1", "target", "hop_1", "hop_2", "target",
    ]  # fmt: skip
    assert np.shape(record["strata"][0]["accuracy"]) == (2, 2)
    bridge = record["strata"][2]["accuracy"]
    assert record["results"]["hops/3_hops/lens_hop_1/visit:3"] == round(bridge[1][0], 5)
    assert (run / "plots" / "lens.png").is_file()
    for wrong, message in (
        (["--strata", "9_hops"], "strata=9_hops: hops has none"),
        (["--questions", "0"], "questions=0 must be at least 1"),
        (["--recurrent-steps", "0"], "recurrent_steps=0 must be at least 1"),
    ):
        assert main([*words[:3], *wrong]) == EXIT_USER_ERROR
        assert message in capsys.readouterr().err


def test_a_run_on_text_has_no_exam(own_run, capsys):
    assert main(["analyse", "lens", str(own_run)]) == EXIT_USER_ERROR
    assert "was trained on text" in capsys.readouterr().err
