"""Whatever bits of a run or a source flip, vanish or move: what is read is right, or refused.

Three outcomes are allowed: the file is refused by name, an older checkpoint is used with a warning,
or everything that is read equals the original bit for bit.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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

EXAMPLES = settings(
    max_examples=60,
    phases=(Phase.explicit, Phase.generate),  # shrinking a file of bytes helps nobody
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, float, float, int]]:
    """Return changes: a kind, two places as shares of the file, and a bit."""
    share = st.floats(0, 1, exclude_max=True)
    kind = st.sampled_from(("flip", "cut", "splice", "double", "insert"))
    change = st.tuples(kind, share, share, st.integers(0, 7))
    return draw(st.lists(change, min_size=1, max_size=3))


def damaged(content: bytes, changes: list[tuple[str, float, float, int]]) -> bytes:
    for kind, *shares, bit in changes:
        first, second = sorted(int(share * len(content)) for share in shares)
        if kind == "flip" and content:
            content = content[:first] + bytes([content[first] ^ 1 << bit]) + content[first + 1 :]
        elif kind == "cut":
            content = content[:first]
        elif kind == "splice":
            content = content[:first] + content[second:]
        elif kind == "double":
            content = content[:second] + content[first:]
        elif kind == "insert":
            content = content[:first] + bytes([bit]) + content[first:]
    return content


def architecture_of(step: int) -> dict[str, Any]:
    return {"family": "ouro", "dim": 4, "n_layers": step}


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
        trainer = {
            "step": step,
            "tokens": 32 * step,
            "recurrent_steps": 2,
            "architecture": architecture_of(step),
        }
        write_checkpoint(
            directory.checkpoint(step),
            tensors(step),
            {"step": step, "trainer": trainer, "data": {}, "lineage": {"parent": None}},
        )
    return folder


@pytest.fixture
def spoiled(run: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def spoil(run: Path, copy: Path, name: str, changes: list[tuple[str, float, float, int]]) -> bool:
    """Copy a run and damage one file; return whether anything changed."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(damaged(content, changes))
    return damaged(content, changes) != content


def assert_right_or_refused(read: Callable[[], None], name: str) -> None:
    problem = ""
    try:
        read()
    except UserError as error:
        problem = str(error)
    assert not problem or (name in problem and "\n" not in problem)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run, spoiled, caplog, name):
    @EXAMPLES
    @given(damages())
    def check(changes):
        changed = spoil(run, spoiled, f"checkpoints/step-2/{name}", changes)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = newest_good(spoiled / "checkpoints", look_at="hashes")
        assert found is not None
        step, manifest = found
        if step != 2:
            assert step == 1
            assert changed
            assert "Skipping checkpoint step-2" in caplog.text
            assert name in caplog.text
        assert manifest["trainer"]["architecture"] == architecture_of(step)
        reader = CheckpointReader(step_folder(spoiled / "checkpoints", step))
        for key, tensor in tensors(step).items():
            assert torch.equal(reader.read(key), tensor)

    check()


@pytest.mark.parametrize("name", ["tensors.json", "__0_0.distcp"])
def test_damage_below_the_hashes_is_refused_by_name(run, spoiled, name):
    """Read without looking at hashes: never a crash; in the table, never another tensor."""

    @EXAMPLES
    @given(damages())
    def check(changes):
        spoil(run, spoiled, f"checkpoints/step-2/{name}", changes)
        checkpoint = spoiled / "checkpoints" / "step-2"

        def read() -> None:
            reader = CheckpointReader(checkpoint, look_at="manifest")
            for key in reader.tensor_keys():
                reader.read(key)

        assert_right_or_refused(read, str(checkpoint))

    check()


@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl"])
def test_damaged_records_of_a_run_are_refused_by_name_or_still_records(run, spoiled, name):
    @EXAMPLES
    @given(damages())
    def check(changes):
        spoil(run, spoiled, name, changes)
        directory = RunDirectory(spoiled)

        def read() -> None:
            directory.read_run()
            saved = SavedRun(spoiled)
            assert saved.model_options is not None
            assert type(saved.total_tokens) is type(saved.seq_len) is int
            assert all(type(record["step"]) is int for record in directory.read_metrics())

        assert_right_or_refused(read, name)

    check()


FILES = ("source.json", "tokenizer.json", "train/*.ds", "train/*.index", "windows", "pieces")


@pytest.mark.parametrize("name", FILES)
def test_every_damage_of_a_source_is_found(source, tmp_path, name):
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    shutil.copytree(source, whole)
    pack_source(whole, seq_len=32, long_documents="split")
    by_name = dict(zip(("windows", "pieces"), index_paths(whole / "train", 32), strict=True))
    path = by_name.get(name) or next(iter(sorted(whole.glob(name))))
    where = path.relative_to(whole)

    @EXAMPLES
    @given(damages())
    def check(changes):
        changed = spoil(whole, copy, str(where), changes)
        try:
            faults = list(verify_source(copy))
        except UserError as error:
            faults = [str(error)]
        if changed and name == "source.json":  # other white space says the same
            with_hash = path.read_text()
            try:
                same = json.loads((copy / where).read_text()) == json.loads(with_hash)
            except ValueError:
                same = False
            assert bool(faults) != same
        else:
            assert bool(faults) == changed
        assert not faults or any(path.name in fault for fault in faults)

    check()
