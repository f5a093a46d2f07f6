"""Effects of looping that a core shows in minutes; whole tables are in train_configs/LOG.md."""

import subprocess
import sys
from pathlib import Path

import pytest

from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

pytestmark = pytest.mark.effects
SEEDS = ("--debug.seed", "1", "--dataloader.seed", "1")


def trained(folder: Path, recipe: str, stage: str | None = None, *flags: str) -> dict[str, float]:
    """Return what the last exam of a stage of a recipe read, or of a recipe that is one run."""
    words = [recipe, *(["--stage", stage] if stage else []), "--dump-folder", str(folder), *flags]
    subprocess.run([sys.executable, "-m", "titan_loop", "train", *words], check=True)
    return read_jsonl(RunDirectory(folder / (stage or "")).evals_jsonl)[-1]["results"]


def shorter(tokens: int, warmup: int) -> list[str]:
    """Return the flags that end a run after so many tokens, its learning rate with it."""
    rate = f"0:0 linear {warmup}:1e-2 cosine {tokens}:1e-3"
    return [*SEEDS, "--total-tokens", str(tokens), "--learning-rate", rate]


def test_two_hops_take_one_layer_two_recurrent_steps(tmp_path: Path):
    """Guessing is right in 10 % of cases; the questions are not in training."""
    right = trained(tmp_path, "recurrent_depth_effect")
    assert right["permutation_hops/1_hops/acc,none/static:4"] > 0.9
    assert right["permutation_hops/2_hops/acc,none/static:4"] > 0.5
    assert right["permutation_hops/2_hops/acc,none/static:1"] < 0.2


@pytest.mark.parametrize(("arm", "least", "most"), [("discoloop", 0.15, 1.0), ("plain", 0.0, 0.1)])
def test_a_decoded_channel_composes_facts_that_training_never_combined(
    tmp_path: Path, arm: str, least: float, most: float
):
    """A third of two_hop_small; guessing is right in 2.5 % of cases."""
    tokens = str(1_500 * 256 * 3)
    flags = [*SEEDS, "--total-tokens", tokens, "--suite.interval", "1500"]
    right = trained(tmp_path, "two_hop_small", arm, *flags)
    assert right["two_graph/id_2/acc,none/static:2"] > 0.9
    assert least < right["two_graph/ood_2/acc,none/static:2"] < most


def test_loops_of_one_layer_add_to_arithmetic(tmp_path: Path):
    """A third of physics_small's; guessing is right in 20 % of cases."""
    flags = shorter(2_500_000, warmup=200_000)
    once = trained(tmp_path, "physics_small", "mano_1x1", *flags)["mano/acc,none/static:1"]
    looped = trained(tmp_path, "physics_small", "mano_1x4", *flags)["mano/acc,none/static:4"]
    assert looped > once + 0.1


def test_a_layer_that_loops_as_often_as_it_decides_adds_to_arithmetic_and_loses_no_facts(
    tmp_path: Path,
):
    """Three quarters of adaptive_small, whose exam is larger here."""
    flags = [*shorter(3_072_000, warmup=204_800), "--suite.questions", "1000"]
    plain = trained(tmp_path, "adaptive_small", "plain", *flags)
    loops = trained(tmp_path, "adaptive_small", "loop3", *flags)
    right, bits = (f"mano_capo/{key}/static:1" for key in ("mano/acc,none", "knowledge/bits"))
    assert loops[right] > plain[right] + 0.05
    assert loops[bits] > 0.95 * plain[bits]


def test_steps_on_discrete_values_solve_graphs_of_four_to_eight_nodes(tmp_path: Path):
    """The first stage of latent_small on smaller graphs modulo 3; one step solves leaves alone."""
    graphs = {"modulus": 3, "nodes": 8, "fewest-nodes": 4, "leaves": 3, "names": 16}
    flags = [f"--dataloader.{name}={value}" for name, value in graphs.items()]
    flags += ["--dataloader.test-nodes", "4", "8", "--dataloader.most-depth", "3"]
    flags += ["--recurrence.steps", "3", "--recurrence.max-steps", "3"]
    flags += ["--suite.interval", "1000", "--suite.depths", "1", "8"]
    right = trained(
        tmp_path, "latent_small", "discrete_first", *shorter(1_200_000, warmup=24_000), *flags
    )
    assert right["dag_arithmetic/4_nodes/acc,none/static:8"] > 0.6
    assert right["dag_arithmetic/8_nodes/acc,none/static:8"] > 0.15
    assert right["dag_arithmetic/8_nodes/acc,none/static:1"] < 0.05
