"""A real chain of stages in one process: what is carried, what begins anew, what is passed over."""

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.support.tiny import BATCH_TOKENS, tiny_config
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest, reference
from titan_loop.cli import main
from titan_loop.data.load.loader import WindowLoader
from titan_loop.distributed.compiler import LoopCompileConfig
from titan_loop.errors import UserError
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import read_status, status_lines
from titan_loop.training.run import run_training
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 4


def chain(source: Path, folder: Path) -> Recipe:
    """Three stages: higher R; half of it on a larger RoPE base; a fork without moments."""
    first = tiny_config(source, folder, steps=STEPS)
    first.recurrence.steps = Schedule.constant(4)
    second = tiny_config(source, folder, steps=STEPS)
    second.recurrence.steps = Schedule.constant(2)
    second.model.rope_theta = 40_000.0
    fork = tiny_config(source, folder, steps=STEPS)
    fork.checkpoint.carry.optimizer = False
    return Recipe(
        name="chain",
        folder=str(folder),
        stages=[
            Stage(name="1a", config=first),
            Stage(name="1b", parent="1a", config=second),
            Stage(name="fork", parent="1a", config=fork),
        ],
    )


@pytest.fixture
def whole(source: Path, alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the chain, trained once for all tests, which only read it."""
    folder = tmp_path_factory.getbasetemp() / "whole"
    if not folder.exists():
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        run_recipe(chain(source, folder))
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "compile_cache")
    return folder


def with_first(whole: Path, folder: Path) -> Path:
    """Put the trained first stage into a folder, and return the folder."""
    shutil.copytree(whole / "1a", folder / "1a")
    return folder


def checkpoint(folder: Path, stage: str, step: int = STEPS) -> Path:
    return folder / stage / "checkpoints" / f"step-{step}"


def losses(folder: Path, stage: str) -> list[float]:
    return [record["loss"] for record in RunDirectory(folder / stage).read_metrics()]


def test_a_chain_carries_weights_and_says_so(whole):
    parent = reference(checkpoint(whole, "1a"))
    for stage in ("1b", "fork"):
        first = read_manifest(checkpoint(whole, stage, 2))
        assert first["lineage"]["parent"] == parent
        assert first["lineage"]["stage"] == stage
        assert first["trainer"]["tokens"] == 2 * BATCH_TOKENS  # counted from the stage's start
        # A stage that starts from trained weights starts lower than the first did.
        assert losses(whole, stage)[0] < losses(whole, "1a")[0] - 0.1
        # The keep policy may delete that one; the last still says where the stage came from.
        last = read_manifest(checkpoint(whole, stage))
        assert last["lineage"]["parent"] != parent
        assert last["lineage"]["origin"] == parent
    steps = RunDirectory(whole / "1b").read_metrics()
    assert [record["recurrent_steps"] for record in steps] == [2] * STEPS
    assert read_manifest(checkpoint(whole, "1b"))["stage_end"]
    # Moments were carried to one branch and not to the other; R differs, too.
    assert losses(whole, "1b")[1:] != losses(whole, "fork")[1:]


def test_a_stage_that_would_read_its_parent_s_windows_again_is_a_warning(source, tmp_path, capfd):
    recipe = chain(source, tmp_path)
    recipe.stages[1].config.dataloader = WindowLoader.Config(mixture=[f"{source}=1"], seed=1)
    recipe.stages[2].config.model.n_layers = 3  # stops it before anything is trained
    with pytest.raises(UserError, match="stage fork"):
        run_recipe(recipe)
    assert "reads the same windows" not in capfd.readouterr().out
    recipe = chain(source, tmp_path)
    recipe.stages[2].config.model.n_layers = 3
    with pytest.raises(UserError, match="stage fork"):
        run_recipe(recipe)
    assert "stage 1b reads the same windows in the same order as 1a" in capfd.readouterr().out


def test_an_interrupted_chain_goes_on_where_it_was(source, whole, tmp_path, capfd):
    broken = chain(source, with_first(whole, tmp_path))
    broken.stages[1].config.training.steps = 2  # stands for a job that ended in the second stage
    run_recipe(Recipe(name="chain", folder=broken.folder, stages=broken.stages[:2]))
    assert committed_steps(tmp_path / "1b" / "checkpoints") == [2]
    shorter = chain(source, tmp_path)
    shorter.stages[1].config.total_tokens = 2 * BATCH_TOKENS  # a flag of the first start left out
    run_recipe(Recipe(name="chain", folder=shorter.folder, stages=shorter.stages[:2]))
    assert f"since the last start: total_tokens {STEPS * BATCH_TOKENS} →" in capfd.readouterr().out
    run_recipe(chain(source, tmp_path))
    for stage in ("1a", "1b", "fork"):
        assert losses(tmp_path, stage) == losses(whole, stage)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    run_recipe(chain(source, tmp_path))  # nothing is left
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_parent_s_optimiser_is_what_its_run_says(source, tmp_path):
    for only in ("1a", "1b"):
        recipe = chain(source, tmp_path)
        recipe.stage(only).config.optimizer.name = "muon"  # --stage ONLY --optimizer.name muon
        run_recipe(recipe, only=only)
    assert losses(tmp_path, "1b")
    recipe = chain(source, tmp_path)
    recipe.stage("fork").config.checkpoint.carry.optimizer = True
    with pytest.raises(UserError, match=r"1a has moments for optimizer\.name=muon and this stage"):
        run_recipe(recipe, only="fork")


def test_no_stage_starts_from_a_parent_that_was_cut_short(source, tmp_path):
    recipe = chain(source, tmp_path)
    for stage in recipe.stages:
        stage.config.training.steps = 2
    with pytest.raises(UserError) as caught:
        run_recipe(recipe)
    assert str(caught.value) == (
        f"stage 1b starts from 1a, which has {2 * BATCH_TOKENS} of {STEPS * BATCH_TOKENS} tokens "
        f"in {tmp_path / '1a'}; train it to its end (without --training.steps), or fork with "
        "--stage 1b --checkpoint.carry.parent CHECKPOINT"
    )
    assert committed_steps(tmp_path / "1a" / "checkpoints") == [2]
    assert not (tmp_path / "1b").exists()


def test_a_stage_that_has_begun_goes_on_without_its_parent(source, whole, tmp_path):
    with_first(whole, tmp_path)
    begun = chain(source, tmp_path)
    begun.stages[1].config.training.steps = 2
    run_recipe(begun, only="1b")
    shutil.rmtree(tmp_path / "1a")
    run_recipe(chain(source, tmp_path), only="1b")
    assert committed_steps(tmp_path / "1b" / "checkpoints") == [2, 4]


def test_the_flag_for_a_parent_forks_a_stage(source, tmp_path, monkeypatch):
    half = chain(source, tmp_path)
    half.stages[0].config.training.steps = 2
    run_recipe(half, only="1a")
    parent = checkpoint(tmp_path, "1a", 2)
    monkeypatch.setattr(
        "titan_loop.cli.stage_flags.load_recipe", lambda name: chain(source, tmp_path)
    )
    flags = ["--dump-folder", str(tmp_path), "--checkpoint.carry.parent", str(parent)]
    assert main.main(["train", "chain", "--stage", "1b", *flags]) == 0
    manifest = read_manifest(checkpoint(tmp_path, "1b", 2))
    assert manifest["lineage"]["parent"] == reference(parent)
    (root,) = read_status(tmp_path)
    assert {child.name for child in root.children} == {"1b", "fork"}
    flags[1] = str(tmp_path / "alone")
    assert main.main(["train", "chain", "--stage", "1b", *flags]) == 0
    assert status_lines(read_status(tmp_path / "alone"))[1:] == ["everything is trained"]


def a_parent_elsewhere(recipe: Recipe) -> None:
    recipe.stages[2].parent = None
    recipe.stages[2].config.checkpoint.carry.parent = "nowhere/run"


MISTAKES: dict[str, tuple[int, Callable[[Recipe], Any], str]] = {
    "another architecture": (
        1,
        lambda recipe: setattr(recipe.stages[2].config.model, "n_layers", 3),
        r"stage fork: .*model\.n_layers=3 \(checkpoint: 2\)",
    ),
    "longer than its data, unsaid": (
        1,
        lambda recipe: setattr(recipe.stages[1].config, "total_tokens", 10**9),
        r"stage 1b: total_tokens=1000000000 reads source \d+\.\d times; lower it, add documents, "
        r"or allow that many epochs: --stages\.1b\.dataloader\.max-epochs \d+",
    ),
    "a point of the ramp": (
        2,
        lambda recipe: setattr(
            recipe.stages[1].config.batch,
            "global_batch_tokens",
            Schedule.steps([(0, BATCH_TOKENS), (BATCH_TOKENS, BATCH_TOKENS * 3 // 2)]),
        ),
        r"stage 1b: a global batch of 12 windows does not divide by local_batch_size=4 × 2",
    ),
    "layers that do not repeat": (
        1,
        lambda recipe: (
            setattr(recipe.stages[1].config.model, "n_layers", 3),
            setattr(recipe.stages[1].config.checkpoint.carry, "upcycle", "stacked"),
        ),
        "stage 1b: layers=3 does not repeat the checkpoint's 2 layers",
    ),
    "a parent that is not there": (
        1,
        a_parent_elsewhere,
        "stage fork: checkpoint.carry.parent=nowhere/run is neither a checkpoint nor a run",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_any_stage_stops_the_first(source, tmp_path, monkeypatch, mistake):
    world_size, change, message = MISTAKES[mistake]
    monkeypatch.setattr("titan_loop.recipes.start.compat.start_runtime", lambda: (0, world_size))
    recipe = chain(source, tmp_path / "run")
    change(recipe)
    with pytest.raises(UserError, match=message) as caught:
        run_recipe(recipe)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_no_stage_inherits_the_recompilations_of_those_before(source, tmp_path):
    """Each width is a recompilation of the same code; dynamo allows eight, and here two."""
    stages = []
    for number in range(1, 4):
        config = tiny_config(source, tmp_path, steps=2)
        config.model.dim, config.model.n_heads, config.model.n_layers = 16 * number, number, 1
        config.compile = LoopCompileConfig(enable=True, backend="eager")
        config.activation_checkpoint = FullAC.Config()  # each layer is compiled by itself
        stages.append(Stage(name=f"s{number}", config=config))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        run_recipe(Recipe(name="widths", folder=str(tmp_path), stages=stages))
    assert all(stage.complete for stage in read_status(tmp_path))


def test_memory_returns_between_the_stages_of_one_launch(source, tmp_path, monkeypatch):
    """No model is left when the next stage begins, and one group of ranks serves all."""
    stages = []
    for number in range(3):
        config = tiny_config(source, tmp_path, steps=2)
        stages.append(Stage(name=f"s{number}", config=config))
    groups: list[Any] = []

    def watched(*arguments: Any, **how: Any) -> None:
        assert not [thing for thing in gc.get_objects() if type(thing) is LoopTrainer]
        run_training(*arguments, **how)
        groups.append(dist.group.WORLD)

    monkeypatch.setattr("titan_loop.recipes.start.run_training", watched)
    run_recipe(Recipe(name="three", folder=str(tmp_path), stages=stages))
    assert len(groups) == 3
    assert len(set(groups)) == 1
    assert not dist.is_initialized()
