"""The mean of checkpoints is what arithmetic says, names its parents, and is a run like any other.

The reference sums in numpy's longdouble and rounds once, so that it shares no code with the merge.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoint.small_checkpoint import content, flip_a_bit
from tests.families.ouro.hugging_face.conftest import random_model, write_run
from tests.support.command_lines import refused
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.manifest import read_manifest, reference
from titan_loop.checkpoint.merging import checked_weights, merge_checkpoints
from titan_loop.checkpoint.tensors import CheckpointReader, write_checkpoint
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_OK, UserError
from titan_loop.evaluation.task_report import Results, TaskReport
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.runs.run_directory import RunDirectory

ARCHITECTURE = {"family": "ouro", "dim": 5, "n_layers": 1}
WEIGHTS = (1.0, 2.5, 0.0, 4.0)
"""Some of these means lie exactly between two float32 numbers, which shares of 1/7.5 would miss."""


def entries(seed: int) -> dict[str, Any]:
    """Return weights of three dtypes, what has no mean, and the optimiser's state."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(64, 257, generator=generator)
    wide[0] = 1.0
    wide[0, seed] = -0.0  # the sign is lost where 0 times another parent is added
    wide[1] *= 1e-42  # denormals
    return {
        "layers.0.w": wide,
        "half": torch.randn(999, generator=generator).bfloat16(),
        "double": torch.randn(33, generator=generator, dtype=torch.float64),
        "count": torch.tensor([3, 4]),
        "mask": torch.tensor([True, False]),
        "optimizer.state.layers.0.w.exp_avg": wide + 1,
        "optimizer.param_groups.layers.0.w.lr": 0.1 * seed,
    }


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Return four checkpoints of one architecture."""
    paths = [tmp_path / f"parent-{seed}" for seed in range(4)]
    for seed, path in enumerate(paths):
        write_checkpoint(path, entries(seed), content(**ARCHITECTURE))
    return paths


def mean_by_hand(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w x / Σ w with 64 bits of mantissa, rounded to float64."""
    total = sum(
        np.longdouble(weight) * tensor.double().numpy().astype(np.longdouble)
        for weight, tensor in zip(weights, tensors, strict=True)
    )
    return torch.from_numpy(np.asarray(total / sum(map(np.longdouble, weights))).astype(np.float64))


@pytest.mark.parametrize("weights", [(), WEIGHTS])
def test_every_weight_is_the_mean_rounded_once(sources, tmp_path, weights):
    merge_checkpoints(sources, tmp_path / "mean", weights=weights)
    merged = CheckpointReader(tmp_path / "mean")
    parents = [entries(seed) for seed in range(4)]
    assert merged.keys() == sorted(key for key in parents[0] if not key.startswith("optimizer"))
    for key in ("layers.0.w", "half", "double"):
        found, dtype = merged.read(key), parents[0][key].dtype
        expected = mean_by_hand([parent[key] for parent in parents], weights or (1.0,) * 4)
        assert found.dtype == dtype
        if dtype == torch.float64:  # here the order of the sum shows
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-16)
        else:
            assert torch.equal(found, expected.to(dtype)), key
    assert torch.equal(merged.read("count"), torch.tensor([3, 4]))
    assert torch.equal(merged.read("mask"), torch.tensor([True, False]))


def test_the_manifest_names_the_parents_and_counts_no_tokens(sources: list[Path], tmp_path: Path):
    merge_checkpoints(sources[:2], tmp_path / "mean", weights=(1, 3))
    manifest = read_manifest(tmp_path / "mean")
    assert manifest["lineage"] == {
        "parent": None,
        "merged": [
            {**reference(sources[0]), "weight": 0.25},
            {**reference(sources[1]), "weight": 0.75},
        ],
    }
    assert manifest["step"] == manifest["trainer"]["step"] == manifest["trainer"]["tokens"] == 0
    assert manifest["trainer"]["recurrent_steps"] == 4
    assert manifest["trainer"]["architecture"] == ARCHITECTURE
    assert manifest["data"] == content()["data"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": torch.tensor([3, 5])}, "count has no mean"),
        ({"half": torch.zeros(999)}, r"half is torch.float32 \[999\] .* torch.bfloat16 \[999\]"),
        ({"gate.w": torch.zeros(2)}, r"gate.w is torch.float32 \[2\] in .*, but missing in"),
    ],
)
def test_entries_that_differ_are_refused_by_name(sources, tmp_path, change, message):
    write_checkpoint(tmp_path / "other", {**entries(9), **change}, content(**ARCHITECTURE))
    with pytest.raises(UserError, match=message):
        merge_checkpoints([*sources, tmp_path / "other"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return two runs of one architecture that was never trained."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write_run(path, OuroOptions(), random_model(OuroOptions()))
    return paths


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "weights=1 has 1 values for 2 checkpoints"),
        ([0.0, 0.0], "weights=0 0 must be finite and at least 0, with a positive sum"),
        ([math.nan, 1.0], "weights=nan 1 must be finite"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(weights: list[float], message: str):
    with pytest.raises(UserError, match=message):
        checked_weights(weights, 2)


def test_checkpoints_that_do_not_fit_are_one_line_and_leave_nothing(runs, tmp_path, capfd):
    first, second = runs
    merge, to_new = ("checkpoint", "merge"), ("--output", tmp_path / "mean")
    other = tmp_path / "other"
    options = OuroOptions(n_layers=3, rope_theta=5e4)
    write_run(other, options, random_model(options))
    message = refused(capfd, *merge, first, other, *to_new)
    assert "another architecture" in message
    assert "model.n_layers=2 (checkpoint: 3)" in message

    flip_a_bit(next(second.glob("checkpoints/*/*.distcp")))
    message = refused(capfd, *merge, *runs, *to_new)
    assert "is damaged: __0_0.distcp has a different SHA-256" in message
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "other"}


def evaluated(run: Path) -> Results:
    assert main(["eval", str(run), "--depths", "1", "2", "--windows", "4"]) == EXIT_OK
    (report,) = TaskReport.all_of(RunDirectory(run))
    return report.tasks


@pytest.mark.usefixtures("alone")
def test_a_merged_run_is_one_like_any_other(source: Path, tmp_path: Path):
    trained, same, mean = (tmp_path / name for name in ("trained", "same", "mean"))
    train_run(tiny_config(source, trained))
    parents = [str(RunDirectory(trained).checkpoint(step)) for step in (6, 4)]
    for output, weights in ((same, ("1", "0")), (mean, ("1", "1"))):
        command = ["checkpoint", "merge", *parents, "--output", str(output)]
        assert main([*command, "--weights", *weights]) == EXIT_OK
    before = {name: results["static:1"] for name, results in evaluated(trained).items()}
    assert {name: results["static:1"] for name, results in evaluated(same).items()} == before
    assert {name: results["static:1"] for name, results in evaluated(mean).items()} != before
    folder = tmp_path / "folder"
    assert main(["convert", "export", str(mean), "--output", str(folder)]) == EXIT_OK
    assert '"merged"' in (folder / "README.md").read_text(encoding="utf-8")
