"""A save by one rank: the files it writes, its retries, and the remains of a failure."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist

from tests.checkpoint.small_checkpoint import state
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest, reference
from titan_loop.checkpoint.saving import RetryPolicy, save_checkpoint
from titan_loop.checkpoint.tensors import CheckpointReader

CONTENT = {
    "step": 7,
    "trainer": {"step": 7, "tokens": 0, "recurrent_steps": 2, "architecture": {}},
    "data": {},
    "lineage": {},
}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited for."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def saved(
    folder: Path,
    group: dist.ProcessGroup,
    content: Callable[[], dict[str, Any]],
    on_commit: Callable[[], None] = lambda: None,
) -> Any:
    path, retry = folder / "step-7", RetryPolicy(3, 2.0)
    return save_checkpoint(path, content, CONTENT, group=group, retry=retry, on_commit=on_commit)


def test_a_save_that_fails_is_tried_again(tmp_path: Path, group, waits, caplog):
    tried: list[int] = []

    def content() -> dict[str, Any]:
        tried.append(len(tried) + 1)
        if len(tried) < 3:
            raise OSError(f"the disk\nis gone ({len(tried)})")
        return state()

    committed: list[list[int]] = []
    found = saved(tmp_path, group, content, lambda: committed.append(committed_steps(tmp_path)))
    assert committed == [[7]]  # afterwards, and once
    assert found == reference(tmp_path / "step-7")
    assert read_manifest(tmp_path / "step-7")["step"] == 7
    assert torch.equal(CheckpointReader(tmp_path / "step-7").read("weight"), state()["weight"])
    assert (tried, waits) == ([1, 2, 3], [2.0, 4.0])
    for number in (1, 2):
        said = f"failed (attempt {number} of 3): OSError: the disk is gone ({number}) (rank 0)"
        assert said in caplog.text


def test_what_an_older_attempt_left_is_gone_and_a_late_failure_undoes_nothing(
    tmp_path: Path, group, waits, caplog
):
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "rank-9.bin").write_text("of another world size")

    def late() -> None:
        raise OSError("the webhook is gone")

    assert saved(tmp_path, group, state, late) == reference(tmp_path / "step-7")
    assert not (tmp_path / "step-7" / "rank-9.bin").exists()
    assert committed_steps(tmp_path) == [7]
    assert "is saved, but the work after it failed" in caplog.text
    assert waits == []
