"""A run that came from a Hugging Face folder: what it is good for, and what it says it lacks."""

from pathlib import Path

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import convert, random_model, write_run
from tests.support.tiny import TINY_VOCABULARY, tiny_config
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.schedule import Schedule

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def imported(source: Path, tmp_path: Path) -> Path:
    options = OuroOptions(vocab_size=TINY_VOCABULARY)
    write_run(tmp_path / "run", options, random_model(options), mixture=[f"{source}=1"])
    convert("export", tmp_path / "run", "--output", tmp_path / "folder")
    convert("import", tmp_path / "folder", "--output", tmp_path / "imported")
    return tmp_path / "imported"


def test_training_starts_from_its_weights(imported, source, tmp_path):
    config = tiny_config(source, tmp_path / "trained", steps=2)
    config.checkpoint.carry.parent = str(imported)
    config.learning_rate = Schedule.constant(0)  # so that the weights stay what was loaded
    with pytest.raises(UserError, match=r"no optimizer moments; .*--checkpoint\.carry\.no-opt"):
        run_recipe(Recipe.of_one_run("trained", config))
    assert not (tmp_path / "trained").exists()
    inside = tiny_config(source, imported, steps=2)
    with pytest.raises(UserError, match="no optimizer moments, as after an import; train another"):
        run_recipe(Recipe.of_one_run("imported", inside))
    assert not (imported / "metrics.jsonl").exists()
    config.checkpoint.carry.optimizer = False
    run_recipe(Recipe.of_one_run("trained", config))
    last = CheckpointReader(RunDirectory(tmp_path / "trained").checkpoint(2))
    first = CheckpointReader(RunDirectory(imported).checkpoint(0))
    assert last.manifest["lineage"]["origin"]["path"] == str(first.checkpoint.resolve())
    for key in first.tensor_keys():
        assert torch.equal(last.read(key), first.read(key)), key
    assert read_manifest(first.checkpoint)["trainer"]["tokens"] == 0
