"""The average of the weights in one process: its formula, its start, and that it is resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.tiny import BATCH_WINDOWS, act_as_launched, tiny_config, train_run
from titan_loop.checkpoint.loading import AVERAGE_PREFIX
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.tensors import CheckpointReader, write_checkpoint
from titan_loop.cli.main import main
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.trainer import LoopTrainer
from titan_loop.training.weight_average import WeightAverage, WeightAverageConfig


def test_the_average_is_that_of_its_formula():
    weight, expected = nn.Parameter(torch.zeros(3, 2)), torch.empty(0)
    average = WeightAverage(WeightAverageConfig(decay=0.9), {"w": weight})
    generator = torch.Generator().manual_seed(0)
    for step in range(7):
        with torch.no_grad():
            weight += torch.randn(3, 2, generator=generator)
        seen = weight.detach().double()
        expected = 0.9 * expected + 0.1 * seen if step else seen
        average.update()
    got = average.state_dict()["w"].double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def config_of(
    source: Path, run: Path, *, decay: float, steps: int = 6, tied: bool = False
) -> LoopTrainer.Config:
    config = tiny_config(source, run, steps=6)
    config.model.tie_weights = tied
    config.training.steps, config.training.local_batch_size = steps, BATCH_WINDOWS
    config.held_out.interval = 0
    config.ema.decay = decay
    return config


def saved(run: Path, step: int) -> dict[str, Tensor]:
    reader = CheckpointReader(RunDirectory(run).checkpoint(step))
    return {key: reader.read(key) for key in reader.tensor_keys()}


@pytest.mark.usefixtures("alone")
def test_a_resumed_average_goes_on_bit_for_bit(source, tmp_path):
    train_run(config_of(source, tmp_path / "whole", decay=0.5))
    for steps in (2, 6):
        train_run(config_of(source, tmp_path / "halves", decay=0.5, steps=steps))
    whole, halves = (saved(tmp_path / name, 6) for name in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    name = "layers.0.attention.wo.weight"
    assert not torch.equal(whole[AVERAGE_PREFIX + name], whole[name])


@pytest.mark.usefixtures("alone")
def test_an_average_may_begin_and_end_in_the_middle_of_a_run(source, tmp_path):
    for steps, decay in ((2, 0.0), (4, 0.5), (6, 0.0)):
        train_run(config_of(source, tmp_path, decay=decay, steps=steps))
    names = [key for key in saved(tmp_path, 2) if not key.startswith("optimizer.")]
    plain = {step: saved(tmp_path, step) for step in (2, 4, 6)}
    averaged = [{k for k in plain[step] if k.startswith(AVERAGE_PREFIX)} for step in (2, 4, 6)]
    assert averaged == [set(), {AVERAGE_PREFIX + name for name in names}, set()]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def averaged(request, source, tmp_path_factory) -> tuple[Path, Path]:
    """A run with an average, and a copy of it whose weights are that average."""
    folder = tmp_path_factory.mktemp("averaged")
    act_as_launched(1)
    train_run(config_of(source, folder / "run", decay=0.5, steps=2, tied=request.param))
    dist.destroy_process_group()
    shutil.copytree(folder / "run", folder / "copy")
    step = RunDirectory(folder / "copy").checkpoint(2)
    manifest = read_manifest(step)
    shutil.rmtree(step)
    entries = saved(folder / "run", 2)
    if request.param:  # a head without an average of its own
        table = entries[f"{AVERAGE_PREFIX}tok_embeddings.weight"]
        entries[f"{AVERAGE_PREFIX}lm_head.weight"] = table
    weights = {key: entries[AVERAGE_PREFIX + key] for key in entries if "optimizer." not in key}
    write_checkpoint(step, weights, {key: manifest[key] for key in manifest if key != "sha256"})
    return folder / "run", folder / "copy"


@pytest.mark.usefixtures("alone")
def test_a_fork_starts_its_own_average(source, averaged, tmp_path):
    tied = RunDirectory(averaged[0]).read_config()["model"]["tie_weights"]
    fork = config_of(source, tmp_path / "fork", decay=0.9, steps=1, tied=tied)
    fork.checkpoint.carry.parent = str(averaged[0])
    train_run(fork)
    entries = saved(tmp_path / "fork", 1)
    averages = [key for key in entries if key.startswith(AVERAGE_PREFIX)]
    assert averages
    for key in averages:
        assert torch.equal(entries[key], entries[key.removeprefix(AVERAGE_PREFIX)]), key


def test_eval_scores_the_average_and_keeps_its_report_apart(averaged):
    run, copy = averaged
    for path, ema in ((run, ["--ema"]), (run, []), (copy, [])):
        assert main(["eval", str(path), "--windows", "4", *ema]) == 0
    results = [
        json.loads((path / "evals" / name).read_text())["tasks"]
        for path, name in (
            (run, "tasks-ema-step-2.json"),
            (copy, "tasks-step-2.json"),
            (run, "tasks-step-2.json"),
        )
    ]
    assert results[0] == results[1] != results[2]


def test_an_average_that_is_not_there_is_one_line(averaged, tmp_path, capsys):
    assert main(["eval", str(averaged[1]), "--ema"]) == 2
    assert "has no average of its weights; leave out --ema" in capsys.readouterr().err
    assert main(["eval", str(averaged[0]), "--ema", "--frontier"]) == 2
    assert "leave out --ema" in capsys.readouterr().err
