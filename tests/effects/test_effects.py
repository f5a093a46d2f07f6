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


@pytest.mark.effects
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("arm", "least", "most"), [("discoloop", 0.15, 1.0), ("plain", 0.0, 0.1)])
def test_a_decoded_channel_composes_facts_that_training_never_combined(
    tmp_path: Path, arm: str, least: float, most: float
):
    """A third of two_hop_small; guessing is right in 2.5 % of cases."""
    words = ["train", "two_hop_small", "--stage", arm, "--dump-folder", str(tmp_path)]
    seeds = ["--debug.seed", "1", "--dataloader.seed", "1"]
    tokens = str(1_500 * 256 * 3)
    assert main([*words, *seeds, "--total-tokens", tokens, "--suite.interval", "1500"]) == 0
    right = read_jsonl(RunDirectory(tmp_path / arm).evals_jsonl)[-1]["results"]
    assert right["two_graph/id_2/acc,none/static:2"] > 0.9
    assert least < right["two_graph/ood_2/acc,none/static:2"] < most
