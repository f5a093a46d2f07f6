"""Continuing from a model that exists keeps what shapes its behaviour, or says what differs."""

import json
import shutil
from pathlib import Path

import pytest

from tests.families.ouro.hugging_face.conftest import convert, random_model, write_run
from tests.support.tiny import SEQ_LEN, TINY_VOCABULARY, tiny_config
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.registry import load_recipe
from titan_loop.recipes.starting_point import start_from
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve

pytestmark = pytest.mark.usefixtures("alone")
BASE = 40_000.0


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model that no named size has."""
    path = tmp_path_factory.mktemp("model")
    options = OuroOptions(vocab_size=TINY_VOCABULARY, n_layers=3, rope_theta=BASE)
    write_run(path / "run", options, random_model(options), mixture=[f"{source}=1"])
    convert("export", path / "run", "--output", path / "folder")
    return path / "folder"


def train(source: Path, run: Path, *flags: object) -> int:
    words = [
        "train", "quickstart", "--dump-folder", run, "--dataloader.mixture", f"{source}=1",
        "--training.seq-len", SEQ_LEN, "--batch.global-batch-tokens", 4 * SEQ_LEN,
        "--held-out.interval", 0, "--metrics.no-enable-tensorboard", *flags,
    ]  # fmt: skip
    return main([str(word) for word in words])


def test_one_command_continues_an_exported_folder(
    source: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    recipe = load_recipe("quickstart")
    recipe.stages[0].config.model.dropout = 0.1
    start_from(recipe, folder, only=None, folder=str(run), command=[])
    assert recipe.stages[0].config.model.dropout == 0.1
    start = ("--from", folder, "--total-tokens")
    assert train(source, run, *start, 8 * SEQ_LEN) == 0
    model = RunDirectory(run).read_config()["model"]
    assert (model["n_layers"], model["dim"], model["rope_theta"]) == (3, 64, BASE)
    manifest = read_manifest(RunDirectory(run).checkpoint(2))
    imported = RunDirectory(run / "imported").checkpoint(0)
    assert manifest["lineage"]["origin"]["path"] == str(imported.resolve())
    assert train(source, run, *start, 12 * SEQ_LEN) == 0  # goes on, and imports nothing again
    assert RunDirectory(run).read_metrics()[-1]["step"] == 3
    log = RunDirectory(run).log_txt.read_text()
    for text in (
        f"Trained to the end: {8 * SEQ_LEN} tokens",
        "step 3/3 100%",
        "last start: total_",
    ):
        assert log.count(text) == 1, log
    assert not any(text in log for text in ("Training completed", "already init", "exhausted"))
    assert train(source, run, *start, 99 * SEQ_LEN, "--training.steps", 4) == 0
    log = RunDirectory(run).log_txt.read_text()
    assert (
        f"Ended at step 4, the limit of training.steps, after {16 * SEQ_LEN} of 3,168 tokens" in log
    )


def test_what_a_parent_leaves_open(source: Path, folder: Path, tmp_path: Path):
    convert("import", folder, "--output", tmp_path / "imported")
    config = tiny_config(source, tmp_path / "run", steps=2)
    assert resolve(config, 1).architecture["rope_theta"] == 10_000.0
    config.model.n_layers = 3
    config.checkpoint.carry.parent = str(tmp_path / "imported")
    config.checkpoint.carry.optimizer = False
    run = resolve(config, 1)
    assert run.config.model.rope_theta == run.architecture["rope_theta"] == BASE
    assert config.model.rope_theta is None


def test_a_model_needs_its_own_tokenizer(
    source: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    other = shutil.copytree(source, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "NFC"}}))
    assert train(other, tmp_path / "run", "--from", folder) == 2
    assert "is not the one" in capfd.readouterr().err
    shutil.copytree(folder, tmp_path / "second")
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    (tmp_path / "second" / "config.json").write_text(json.dumps(config, indent=3))
    assert train(source, tmp_path / "run", "--from", tmp_path / "second") == 2
    assert "imported holds another model" in capfd.readouterr().err
    assert train(source, tmp_path / "run", "--from", tmp_path / "nowhere") == 2
    assert "nowhere is not a folder" in capfd.readouterr().err


def test_a_tokenizer_that_was_saved_again_is_the_same_one(
    source: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    again = shutil.copytree(folder, tmp_path / "again")
    tokenizer = json.loads((again / "tokenizer.json").read_text())
    nothing = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    (again / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": nothing}))
    run = tmp_path / "run"
    assert train(source, run, "--from", again, "--total-tokens", 4 * SEQ_LEN) == 0
    assert main(["eval", str(run / "imported"), "--sources", str(source), "--windows", "2"]) == 0
    merged = ("merge", run, run / "imported", "--output", tmp_path / "merged")
    assert main(["checkpoint", *map(str, merged)]) == 0


def test_several_ranks_do_not_import_one_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several ranks cannot import it; run titan-loop convert"):
        start_from(
            load_recipe("quickstart"), folder, only=None, folder=str(tmp_path / "run"), command=[]
        )
    assert not (tmp_path / "run").exists()
