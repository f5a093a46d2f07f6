"""Whatever bits of a run or a source flip, vanish or move: what is read is right, or refused.

Three outcomes are allowed: the file is refused by name, an older checkpoint is used with a warning,
or everything that is read equals the original bit for bit.
"""

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.hostile.spoiling import damaged
from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import step_folder
from titan_loop.checkpoint.tensors import CheckpointReader, write_checkpoint
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.prepare.packing import pack_source
from titan_loop.data.source_card import index_paths
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import append_jsonl

pytestmark = pytest.mark.hostile

TIMES = 60


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(5, 7, generator=generator) for name in ("a", "b", "optimizer.c")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, a configuration and logs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    directory = RunDirectory(folder)
    model = {"family": "ouro", "n_layers": 2}
    config = {"model": model, "training": {"seq_len": 32}, "total_tokens": 64}
    directory.create_or_open(["test"], config=config)
    for step in (1, 2):
        append_jsonl(directory.metrics_jsonl, {"step": step, "tokens": 32 * step, "loss": 1.0})
        trainer = {"step": step, "tokens": 32 * step, "recurrent_steps": 2, "architecture": model}
        record = {"step": step, "trainer": trainer, "data": {}, "lineage": {"parent": None}}
        write_checkpoint(directory.checkpoint(step), tensors(step), record)
    return folder


def spoiled(whole: Path, copy: Path, name: str) -> Iterator[bool]:
    """Damage one file of a copy again and again; yield whether anything changed."""
    content = (whole / name).read_bytes()
    for seed in range(TIMES):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        (copy / name).write_bytes(damaged(content, random.Random(seed)))
        yield (copy / name).read_bytes() != content


def refusal(read: Callable[[], object]) -> str:
    try:
        read()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["manifest.json", "tensors.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run, tmp_path, caplog, name):
    for changed in spoiled(run, tmp_path / "run", f"checkpoints/step-2/{name}"):
        caplog.clear()
        checkpoints = tmp_path / "run" / "checkpoints"
        with caplog.at_level(logging.WARNING):
            found = newest_good(checkpoints, look_at="hashes")
        assert found is not None
        if found[0] != 2:
            assert changed
            assert "Skipping checkpoint step-2" in caplog.text
            assert name in caplog.text
        reader = CheckpointReader(step_folder(checkpoints, found[0]))
        for key, tensor in tensors(found[0]).items():
            assert torch.equal(reader.read(key), tensor)


@pytest.mark.parametrize("name", ["tensors.json", "__0_0.distcp"])
def test_damage_below_the_hashes_is_refused_by_name(run, tmp_path, name, monkeypatch):
    """As with hashes that match: never a crash; in the table, never another tensor."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    monkeypatch.setattr("titan_loop.checkpoint.tensors.find_damage", lambda *_: {})

    def read() -> None:
        reader = CheckpointReader(checkpoint)
        for key in reader.tensor_keys():
            reader.read(key)

    for _ in spoiled(run, tmp_path / "run", f"checkpoints/step-2/{name}"):
        said = refusal(read)
        assert not said or (str(checkpoint) in said and "\n" not in said)


@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl"])
def test_damaged_records_of_a_run_are_refused_by_name_or_still_records(run, tmp_path, name):
    def read() -> None:
        directory, saved = RunDirectory(tmp_path / "run"), SavedRun(tmp_path / "run")
        directory.read_run()
        assert saved.model_options is not None
        assert type(saved.total_tokens) is type(saved.seq_len) is int
        assert all(type(record["step"]) is int for record in directory.read_metrics())

    for _ in spoiled(run, tmp_path / "run", name):
        said = refusal(read)
        assert not said or (name in said and "\n" not in said)


FILES = ("source.json", "tokenizer.json", "train/*.ds", "train/*.index", "windows", "pieces")


@pytest.mark.parametrize("name", FILES)
def test_every_damage_of_a_source_is_found(source, tmp_path, name):
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    shutil.copytree(source, whole)
    pack_source(whole, seq_len=32, long_documents="split")
    by_name = dict(zip(("windows", "pieces"), index_paths(whole / "train", 32), strict=True))
    path = by_name.get(name) or next(iter(sorted(whole.glob(name))))
    for changed in spoiled(whole, copy, str(path.relative_to(whole))):
        faults: list[str] = []
        said = refusal(lambda faults=faults: faults.extend(verify_source(copy)))
        faults += [said] if said else []
        if changed and name == "source.json":  # other white space says the same
            try:
                changed = json.loads((copy / name).read_text()) != json.loads(path.read_text())
            except ValueError:
                changed = True
        assert bool(faults) == changed
        assert not faults or any(path.name in fault for fault in faults)
