"""Iterations against the loss, from made-up records of training."""

import json
from pathlib import Path

from tests.evaluation.task_run import write_task_run
from titan_loop.cli.main import main
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl

NATS = [4.0, 3.0, 2.0, 1.0]
LAYERS = {1: [2.0, 1.5, 1.6, 1.7], 2: [2.0, 1.3, 1.0, 2.5]}
RECORDS = [
    {
        "step": step,
        "tokens": 10 * step,
        "ce/step_1": nats,
        **{f"loops/layer_{layer}": values[step] for layer, values in LAYERS.items()},
    }
    for step, nats in enumerate(NATS)
]


def test_the_verb_finds_the_loss_at_which_layers_loop_least(tmp_path: Path, capsys):
    run = write_task_run(tmp_path / "loop3", AdaptiveOptions())
    for record in RECORDS:
        append_jsonl(RunDirectory(run).metrics_jsonl, record)
    assert main(["analyse", "loops", str(run)]) == 0
    assert "layers loop least at a cross entropy of 2.000 nats" in capsys.readouterr().out
    record = json.loads((run / "evals" / "loops-step-3.json").read_text())
    results = record["results"]
    assert results["loops/onset_nats/lowest"] == 2.0
    assert results["loops/layer_2/iterations/end"] == 2.5
