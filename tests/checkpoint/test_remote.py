"""Checkpoints in object storage: copied after the commit, fetched when nothing whole is here."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.checkpoint.test_choosing import committed
from tests.support.holder import held
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.folders import add_tag, committed_steps, read_tags
from titan_loop.checkpoint.keep_policy import KeepPolicy
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.remote import RemoteCheckpoints, Uploader, fetch_if_needed
from titan_loop.checkpoint.saving import RetryPolicy
from titan_loop.errors import RunFailedError, UserError
from titan_loop.recipes.on_disk import fetch_checkpoints
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.remote_folder import RemoteFolder


@pytest.fixture
def memory() -> Iterator[Any]:
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]
    yield file_system
    file_system.store.clear()


STORE = "memory://bucket/runs"


def remote(run: Path, url: str = STORE) -> RemoteCheckpoints:
    """Open a store as the run that wrote there."""
    with suppress(FileNotFoundError):
        owner = RemoteFolder(f"{url}/base", "checkpoint.remote").read("owner.json")
        run.mkdir(parents=True, exist_ok=True)
        (run / "remote.json").write_bytes(owner)
    return RemoteCheckpoints(url, stage="base", run=run)


def upload_all(
    run: Path, steps: list[int], attempts: int = 3, url: str = STORE
) -> RemoteCheckpoints:
    copies = Uploader(remote(run, url), KeepPolicy(keep_latest_k=2), RetryPolicy(attempts, 0.0))
    for step in steps:
        there = run / "checkpoints" / f"step-{step}"
        copies.submit(there if there.exists() else committed(run / "checkpoints", step))
    copies.close()
    return copies.remote


def test_what_is_uploaded_is_fetched_bit_for_bit_and_old_ones_go(memory, tmp_path):
    there = upload_all(tmp_path / "one", [2, 4, 6])
    assert there.steps() == [4, 6]
    other = tmp_path / "two"
    fetch_if_needed(remote(other), other)
    assert committed_steps(other / "checkpoints") == [6]
    for file in (tmp_path / "one" / "checkpoints" / "step-6").iterdir():
        assert (other / "checkpoints" / "step-6" / file.name).read_bytes() == file.read_bytes()
    fetch_if_needed(remote(other), other)  # has one now
    assert committed_steps(other / "checkpoints") == [6]


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5])
def test_an_interrupted_upload_never_counts(memory, tmp_path, monkeypatch, fails_at):
    upload_all(tmp_path, [2])
    put, calls = type(memory).put_file, []

    def broken(self, local, path, *arguments, **keywords):
        calls.append(path)
        if len(calls) >= fails_at:
            raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return put(self, local, path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", broken)
        there = upload_all(tmp_path, [4], attempts=1)
    assert there.steps() == [2]
    other = tmp_path / "other"
    fetch_if_needed(remote(other), other)
    assert committed_steps(other / "checkpoints") == [2]
    assert upload_all(tmp_path, [6]).steps() == [2, 6]  # and what was left of 4 is gone
    assert not memory.exists("/bucket/runs/base/step-4")


def test_a_damaged_remote_checkpoint_is_skipped(memory, tmp_path, caplog):
    upload_all(tmp_path, [2, 4])
    path = "/bucket/runs/base/step-4/__0_0.distcp"
    memory.pipe_file(path, memory.cat_file(path)[::-1])
    other = tmp_path / "other"
    fetch_if_needed(remote(other), other)
    assert committed_steps(other / "checkpoints") == [2]
    assert "step-4: __0_0.distcp has a different SHA-256" in caplog.text
    memory.rm("/bucket/runs/base/step-2/__0_0.distcp")
    with pytest.raises(RunFailedError, match=r"no checkpoint in .* arrived whole"):
        remote(tmp_path / "third").fetch_newest()
    assert not list((tmp_path / "third" / "checkpoints").iterdir())


def test_a_new_run_directory_goes_on_with_a_remote_run_only_if_told_to(memory, tmp_path):
    upload_all(tmp_path / "one", [2])
    with pytest.raises(UserError, match=r"of another run; .* copy its owner.json to .*/remote.j"):
        RemoteCheckpoints(STORE, stage="base", run=tmp_path / "two")
    assert not (tmp_path / "two" / "remote.json").exists()
    assert remote(tmp_path / "two").steps() == [2]
    RemoteCheckpoints(STORE, stage="base", run=tmp_path / "one")


def test_nothing_is_fetched_into_a_run_that_another_process_trains(memory, source, tmp_path):
    upload_all(tmp_path / "one", [2])
    config = tiny_config(source, tmp_path / "run")
    config.checkpoint.remote, config.stage = STORE, "base"
    remote(tmp_path / "run")
    with held(Path(config.dump_folder)):
        fetch_checkpoints(config)
        assert not (tmp_path / "run" / "checkpoints").exists()
    fetch_checkpoints(config)
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2]


def test_tagged_checkpoints_stay_there_whenever_they_were_tagged(memory, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    add_tag(committed(checkpoints, 2), "before it was copied")
    upload_all(tmp_path, [2, 4])
    add_tag(checkpoints / "step-4", "after")
    there = upload_all(tmp_path, [6, 8, 10])
    assert there.steps() == [2, 4, 8, 10]
    shutil.rmtree(checkpoints)
    there = upload_all(tmp_path, [12, 14])  # what it knows of 2 and 4 is what is there
    assert there.steps() == [2, 4, 12, 14]
    memory.rm("/bucket/runs/base/step-14", recursive=True)
    memory.rm("/bucket/runs/base/step-12", recursive=True)
    fetch_if_needed(remote(tmp_path / "other"), tmp_path / "other")
    assert read_tags(tmp_path / "other" / "checkpoints" / "step-4") == ["after"]


@pytest.mark.usefixtures("alone")
def test_a_run_whose_disk_is_lost_goes_on_from_its_remote_bitwise(source, tmp_path):
    def config(name: str, limit: int = 0, url: str = "") -> Any:
        made = tiny_config(source, tmp_path / name, steps=6)
        made.training.steps = limit
        made.checkpoint.remote = url
        return made

    train_run(config("whole"))
    url = f"file://{tmp_path}/remote"
    train_run(config("run", limit=4, url=url))
    assert read_manifest(tmp_path / "remote" / "step-4")["step"] == 4
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "remote" / "owner.json", tmp_path / "run" / "remote.json")
    train_run(config("run", url=url))
    whole, run = (RunDirectory(tmp_path / name).read_metrics() for name in ("whole", "run"))
    assert [r["loss"] for r in run] == [r["loss"] for r in whole[4:]]
    assert committed_steps(tmp_path / "run" / "checkpoints") == [4, 6]
    shutil.rmtree(tmp_path / "remote" / "step-6")  # killed after the last save, before its copy
    train_run(config("run", url=url))
    assert read_manifest(tmp_path / "remote" / "step-6")["step"] == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_over_the_protocol_of_s3(s3, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="titan_loop")
    assert upload_all(tmp_path / "one", [2, 4, 6], url=f"{s3}/runs").steps() == [4, 6]
    other = tmp_path / "two"
    fetch_if_needed(remote(other, f"{s3}/runs"), other)
    assert committed_steps(other / "checkpoints") == [6]
    with pytest.raises(UserError, match=r"checkpoint.remote=s3://nowhere.*FileNotFoundError"):
        remote(tmp_path / "three", "s3://nowhere/runs")
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in caplog.text
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(UserError, match=r"NoCredentialsError.*check .* the credentials"):
        remote(tmp_path / "four", f"{s3}/runs")
