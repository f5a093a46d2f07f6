"""Commands, configuration file and example of the data package's README work as they stand."""

import json
from pathlib import Path

import pytest

import titan_loop.data
from tests.data.shapes.shape import json_lines, jsonl
from tests.readme import example, run_commands, run_example
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.prepare.config import Minhash, read_prepare_config
from titan_loop.data.prepare.packing import pack_source
from titan_loop.runs.run_directory import RunDirectory

PACKAGE = Path(titan_loop.data.__path__[0])
README, PREPARING, READING = (PACKAGE / name / "README.md" for name in ("", "prepare", "load"))


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder `my` of JSON lines in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    package = Path(titan_loop.__path__[0])
    for name in ("data", "cli"):
        texts = [path.read_text() for path in sorted((package / name).glob("*.py"))]
        (tmp_path / "my" / f"{name}.jsonl").write_bytes(jsonl([*filter(None, texts)]))


@pytest.mark.usefixtures("texts")
def test_the_commands_run(tmp_path, capsys):
    chats = [{"question": f"{n} + {n}?", "answer": f"{2 * n}."} for n in range(40)]
    (tmp_path / "chats.jsonl").write_bytes(json_lines(chats))
    assert run_commands(README) == 6
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦" in out
    assert out.endswith("sources/my: sound\n")
    mixture = README.read_text().split("--dataloader.mixture ")[1].split("`")[0].split(",")
    config = WindowLoader.Config(mixture=mixture)
    assert config.build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=2)


def test_the_configuration_file_is_accepted(tmp_path):
    path = tmp_path / "prepare.toml"
    path.write_text(example(PREPARING, "toml"))
    config = read_prepare_config(path)
    assert list(config.quality) == ["gopher_quality", "gopher_repetition"]
    assert config.minhash == Minhash()
    assert config.slurm["partition"] == "cpu"


@pytest.mark.usefixtures("texts")
def test_the_example_runs():
    names = run_example(README)
    assert [len(labels) for _, labels in names["micro_batches"]] == [4] * 4
    assert names["evaluation"].labels.shape == (4, 256)


@pytest.mark.slow
def test_the_commands_for_training_run(tmp_path, monkeypatch, write_source, documents, capfd):
    monkeypatch.chdir(tmp_path)
    write_source("sources/my", [documents(1, 900, 40)])
    pack_source(write_source("sources/chats", [documents(2, 300, 40)]), seq_len=256)
    assert run_commands(READING, "sh") == 2
    assert "chats" in capfd.readouterr().out
    run = RunDirectory(tmp_path / "runs" / "quickstart")
    last = run.read_metrics()[-1]
    assert last["data/my/tokens"] + last["data/chats/tokens"] == last["tokens"] == 2048
    assert 0 < last["data/my/epochs"] < 4
    assert 0 <= last["data_wait"] < 1
    manifest = json.loads(next(run.path.glob("checkpoints/step-2/manifest.json")).read_text())
    assert manifest["data"]["read"]["tokens"] == [last["data/my/tokens"], last["data/chats/tokens"]]
    assert manifest["data"]["data_hash"] == last["data_hash"]
