"""Logit lens: each waypoint is read where it belongs, with and without a norm every step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.task_run import MODELS, TASK, random_model, walk, write_task_run
from titan_loop.cli.main import main
from titan_loop.data.tasks.two_graph import Chain, TwoGraph
from titan_loop.data.tasks.two_hop_systematic import TwoHopSystematic
from titan_loop.errors import EXIT_USER_ERROR
from titan_loop.evaluation.logit_lens import logit_lens, logit_margin

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


def test_waypoints_of_the_tasks():
    systematic = TwoHopSystematic(entities=30, relations=9, degree=5, inferred_ratio=2.0)
    (question,) = systematic.held_out_questions(1, "id")
    _, tails = systematic.edges
    bridge = int(tails[question[0]])
    assert question[1] // 5 == bridge
    assert systematic.waypoints(question) == {
        "bridge": (1, bridge), "target": (2, int(tails[question[1]])),
    }  # fmt: skip
    assert list(systematic.waypoints(question[:1])) == ["target"]
    chain = Chain(0, (3, 5, 7, 8), (1, 4, 0))
    for form, positions in (("symbolic", (1, 2, 3)), ("direct", (2, 4, 7)), ("reverse", (14,))):
        task = TwoGraph(entities=10, relations=5, degree=2, hops=3, inferred_ratio=1.0, form=form)
        tokens = task.encode(chain).tokens
        found = task.waypoints(chain)
        assert tuple(at for at, _ in found.values()) == positions
        assert [token for _, token in found.values()] == [5, 7, 8][-len(positions) :]
        for (at, _), relation in zip(found.values(), chain.relations, strict=False):
            assert form == "reverse" or at == positions[-1] or tokens[at] == 20 + relation


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
    assert (run / "plots" / "lens.png").is_file()
    for wrong, message in (
        (["--strata", "9_hops"], "strata=9_hops: permutation_hops has none"),
        (["--questions", "0"], "questions=0 must be at least 1"),
        (["--recurrent-steps", "0"], "recurrent_steps=0 must be at least 1"),
    ):
        assert main([*words[:3], *wrong]) == EXIT_USER_ERROR
        assert message in capsys.readouterr().err


def test_a_run_on_text_has_no_exam(own_run, capsys):
    assert main(["analyse", "lens", str(own_run)]) == EXIT_USER_ERROR
    assert "was trained on text" in capsys.readouterr().err
