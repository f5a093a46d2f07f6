"""Runs: a dense model is trained, retrofitted, distilled, scanned and scored."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import convert
from tests.families.retrofit.conftest import opened
from tests.support.tiny import tiny_config, train_run
from titan_loop.cli import main as cli
from titan_loop.families.retrofit.distillation import DistillationLoss
from titan_loop.models.dense import DenseOptions
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

SPANS = ("--prelude", 1, "--core", 2, "--coda", 1)


@pytest.fixture(scope="module")
def dense(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that trained four layers without loops."""
    folder = tmp_path_factory.mktemp("runs") / "dense"
    config = tiny_config(source, folder, steps=2)
    config.model = DenseOptions(size="quickstart")
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(1))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        train_run(config)
        torch.distributed.destroy_process_group()
    return folder


def retrofit(*words: object) -> None:
    """Run `titan-loop retrofit`, which must succeed."""
    assert cli.main(["retrofit", *map(str, words)]) == 0


def distilled(source: Path, start: Path, folder: Path, teacher: str) -> LoopTrainer.Config:
    config = tiny_config(source, folder, steps=3)
    config.model = SavedRun.open(start).model_options
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(2))
    config.loss = DistillationLoss.Config(teacher=teacher, share=0.5)
    config.checkpoint.carry.parent = str(start)
    config.checkpoint.carry.optimizer = False
    return config


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("own", [False, True], ids=["the dense run", "itself"])
def test_new_parameters_alone_train_towards_a_teacher(dense, source, tmp_path, own):
    start = tmp_path / "start"
    retrofit(dense, "--output", start, "--mode", "identity", "--rank", 2, *SPANS)
    config = distilled(source, start, tmp_path / "run", "" if own else str(dense))
    config.model.trained = "new"  # type: ignore[attr-defined]
    train_run(config)
    before, after = (opened(path).state_dict() for path in (start, tmp_path / "run"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    new = {n for n in before if n.startswith("bridge.") or n.endswith((".up", ".down"))}
    assert {"bridge.weight", "layers.1.attention.wo.up"} <= moved <= new
    last = RunDirectory(tmp_path / "run").read_metrics()[-1]
    assert last["distillation/kl"] > 0
    assert last["loss"] == pytest.approx(
        0.5 * last["ce/step_2"] + 0.5 * last["distillation/kl"], rel=1e-5
    )


@pytest.mark.usefixtures("alone")
def test_the_command_that_a_retrofit_advises_trains_it(dense, source, tmp_path, capfd):
    start = tmp_path / "start"
    retrofit(dense, "--output", start, *SPANS)
    advice = capfd.readouterr().out.splitlines()[-1]
    words = advice.partition("titan-loop ")[2].replace("SOURCE", str(source)).split()
    small = ("--total-tokens", 128, "--training.seq-len", 32, "--batch.global-batch-tokens", 64)
    small = (*small, "--held-out.interval", 0, "--training.local-batch-size", 1)
    assert cli.main([*words, *map(str, small)]) == 0
    trained = SavedRun(Path(f"{start}-trained"))
    assert trained.config["model"]["family"] == "retrofit"
    assert trained.checkpoint().tokens == 128


def test_a_scan_says_what_the_plain_loop_costs(dense, tmp_path, capsys):
    retrofit(dense, "--scan", "--windows", 1)  # lengths that these few layers have
    assert "recommended: --prelude" in capsys.readouterr().out
    table = tmp_path / "scan.json"
    retrofit(dense, "--scan", "--lengths", 1, 2, "--windows", 4, "--output", table)
    assert "recommended: --prelude" in capsys.readouterr().out
    record = json.loads(table.read_text())
    assert [(s["start"], s["length"]) for s in record["spans"]] == [
        *((start, 1) for start in range(4)),
        *((start, 2) for start in range(3)),
    ]
    for mode, column in (("plain", "bare"), ("damped", "damped")):
        looped = tmp_path / mode
        retrofit(dense, "--output", looped, "--mode", mode, *SPANS)
        scores = ["eval", str(looped), "--windows", "4", "--depths", "2"]
        assert cli.main(scores) == 0
        report = json.loads((looped / "evals" / "tasks-step-0.json").read_text())
        found = report["tasks"]["held_out/source"]["static:2"]["metrics"]["bits_per_byte"]
        (cost,) = (s[column][0] for s in record["spans"] if (s["start"], s["length"]) == (1, 2))
        assert found == pytest.approx(record["dense"] + cost, abs=2e-4)


def test_text_in_other_tokens_is_refused(dense, source, tmp_path, capsys):
    other = shutil.copytree(source, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "NFC"}}))
    folder = tmp_path / "folder"
    convert("export", dense, "--to", "llama-unrolled", "--output", folder)
    assert cli.main(["retrofit", str(folder), "--scan", "--sources", str(other)]) == 2
    wanted = f"is not the one {folder} was trained with; use {folder}/tokenizer.json"
    assert wanted in capsys.readouterr().err
    start = tmp_path / "start"
    retrofit(dense, "--output", start, *SPANS)
    words = ["--from", start, "--dump-folder", tmp_path / "run", "--dataloader.mixture", other]
    assert cli.main(["train", "nanbeige_quickstart", *map(str, words)]) == 2
    assert "is not the one" in capsys.readouterr().err
