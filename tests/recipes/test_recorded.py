"""A `config.json` trains the same run again; what it leaves out or says wrongly is named."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.cli.main import main
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.models.dense import DenseOptions
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.recipes.recorded import recorded_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.trainer import LoopTrainer


def record(config: LoopTrainer.Config) -> RunDirectory:
    """Write what a start of a run writes."""
    run = RunDirectory(config.dump_folder)
    run.create_or_open(["titan-loop"], config=resolve(config, 1).config.to_dict())
    return run


@pytest.fixture
def run(source: Path, tmp_path: Path) -> RunDirectory:
    return record(tiny_config(source, tmp_path / "run"))


@pytest.mark.usefixtures("alone")
def test_the_same_run_once_more_from_anywhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(source, first / "source")
    second.mkdir()
    monkeypatch.chdir(first)
    parent = tiny_config(Path("source"), Path("runs/parent"), steps=2)
    train_run(parent)
    config = tiny_config(Path("source"), Path("runs/child"))
    config.checkpoint.carry.parent = "runs/parent"
    config.checkpoint.interval = 3
    train_run(config)
    parent.total_tokens *= 2
    train_run(parent)  # the child started from an older checkpoint than this one
    monkeypatch.chdir(second)
    child = RunDirectory(first / "runs" / "child")
    assert main(["train", str(child.config_json)]) == 0
    again = RunDirectory(first / "runs" / "child-again")
    for before, now in zip(child.read_metrics(), again.read_metrics(), strict=True):
        for name in ("step", "tokens", "loss", "grad_norm", "data_hash", "ce/step_1", "ce/step_2"):
            assert before[name] == now[name], name
    manifests = [read_manifest(run.checkpoint(6)) for run in (child, again)]
    assert manifests[0]["lineage"]["origin"] == manifests[1]["lineage"]["origin"]


def gate(config: LoopTrainer.Config) -> None:
    config.trainable, config.loss = "exit_gate", AdaptiveGateLoss.Config(slope=20.0)
    config.activation_checkpoint = FullAC.Config()


def task(config: LoopTrainer.Config) -> None:
    config.dataloader = TaskLoader.Config(task=Mano(modulus=5, max_operations=2), all_targets=True)
    config.model = OuroOptions(size="debugmodel", n_layers=1, positions="none")
    config.optimizer.name, config.muon.momentum = "muon", 0.9
    config.activation_checkpoint = RecurrentStepAC.Config(layers="full")


def prior(config: LoopTrainer.Config) -> None:
    config.loss = ExpectedExitLoss.Config(prior="geometric", geometric_eta=0.3)
    config.recurrence.poisson, config.recurrence.max_steps = True, 5
    config.model = DenseOptions(exit_gate=True, unrotated_layers=(1,))
    config.debug.seed, config.ema.decay = 7, 0.9
    config.training.max_norm = math.inf  # null in JSON


def tuples(config: LoopTrainer.Config) -> None:
    config.model = DenseOptions(positions="learned", learned_positions=64)  # no unrotated_layers


@pytest.mark.parametrize("change", [gate, task, prior, tuples])
def test_every_class_and_field_comes_back(
    change: Callable[[LoopTrainer.Config], None], source: Path, tmp_path: Path
):
    config = tiny_config(source, tmp_path / "run")
    change(config)
    recipe = recorded_recipe(record(config).config_json)
    assert recipe.folder == str(tmp_path / "run-again")
    (stage,) = recipe.stages
    recipe.place(config.dump_folder)
    stage.config.stage = config.stage
    again, before = resolve(stage.config, 1).config, resolve(config, 1).config
    assert again.to_dict() == before.to_dict()
    assert again.model == before.model  # a file has lists in the place of tuples
    assert stage.config.training.max_norm == config.training.max_norm


def rewritten(run: RunDirectory, change: Callable[[dict[str, Any]], object]) -> Path:
    config = run.read_config()
    change(config)
    run.config_json.write_text(json.dumps(config))
    return run.config_json


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("classes"), "'classes' does not name the classes of dataload"),
        (lambda c: c["classes"].update(loss="Loss"), "classes.loss=Loss is a class that this ver"),
        (lambda c: c["classes"].update(loss="os.system"), "classes.loss=os.system is a class"),
        (lambda c: c["classes"].update(dataloader="GlobalBatchLoader"), "is a class that this"),
        (lambda c: c["classes"].update({"dataloader.task": "no"}), "the task 'no', which this ve"),
        (lambda c: c["model"].update(family="no"), "model.family=no is unknown"),
        (lambda c: c["training"].update(seq_lenn=3), "training.seq_lenn is unknown to this ver"),
        (lambda c: c.update(adamw=[]), "adamw=[] must be an object"),
        (lambda c: c["learning_rate"].update(knots=[{"t": 1}]), "learning_rate={'knots': "),
        (
            lambda c: c.update(learning_rate={"knots": []}),
            "is not a schedule: schedule has no knots",
        ),
        (lambda c: c["override"].update(imports=["os.system"]), "was set by a recipe and cannot"),
        (lambda c: c.update(callbacks=[{"class": "mine.Mine"}]), "was set by a recipe and cannot"),
        (lambda c: c["dataloader"].update(curriculum={"enabled": True}), "curriculum.enabled=True"),
        (
            lambda c: c["loss"].update(look_ahead=True),
            "loss.look_ahead=True is not in this version",
        ),
    ],
)
def test_what_a_file_says_wrongly_is_one_line(
    run: RunDirectory, change: Callable[[dict[str, Any]], object], said: str
):
    with pytest.raises(UserError) as raised:
        recorded_recipe(rewritten(run, change))
    assert said in str(raised.value)
    assert str(run.config_json) in str(raised.value)


def test_fields_of_a_later_version_have_their_defaults(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
):
    path = rewritten(run, lambda config: (config.pop("ema"), config["adamw"].pop("eps")))
    (stage,) = recorded_recipe(path).stages
    assert stage.config.adamw.eps == LoopTrainer.Config().adamw.eps
    assert "not in config.json, so at their defaults: ema, adamw.eps" in caplog.text.replace(
        "adamw.eps, ema", "ema, adamw.eps"
    )


@dataclass(kw_only=True, slots=True)
class Marker(ExpectedExitLoss.Config):
    """Config of an objective that no version of titan_loop has."""


class OwnLoss(ExpectedExitLoss):
    Config = Marker


def test_a_class_of_the_user_is_found_once_it_is_imported(source: Path, tmp_path: Path):
    config = tiny_config(source, tmp_path / "run")
    config.loss = OwnLoss.Config(z_loss=0.5)
    (stage,) = recorded_recipe(record(config).config_json).stages
    assert isinstance(stage.config.loss, Marker)
