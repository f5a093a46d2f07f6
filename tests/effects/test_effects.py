"""Effects of looping that a core shows in a minute; whole tables are in train_configs/LOG.md."""

from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl


@pytest.mark.effects
@pytest.mark.usefixtures("alone")
def test_two_hops_take_one_layer_two_recurrent_steps(tmp_path: Path):
    """Guessing is right in 10 % of cases; the questions are not in training."""
    run = RunDirectory(tmp_path)
    assert main(["train", "recurrent_depth_effect", "--dump-folder", str(run.path)]) == 0
    right = read_jsonl(run.evals_jsonl)[-1]["results"]
    assert right["permutation_hops/1_hops/acc,none/static:4"] > 0.9
    assert right["permutation_hops/2_hops/acc,none/static:4"] > 0.5
    assert right["permutation_hops/2_hops/acc,none/static:1"] < 0.2
