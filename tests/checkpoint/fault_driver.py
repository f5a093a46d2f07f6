"""Saves checkpoints in forked processes that meet a fault: killed, disk full, no permission.

`test_faults.py` calls `main` in a process of its own: forking is safe there because nothing has
started a thread.
"""

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from titan_loop.checkpoint import folders, saving
from titan_loop.checkpoint.folders import discard
from titan_loop.checkpoint.saving import RetryPolicy, SaveFailedError, save_checkpoint
from titan_loop.storage import json_files

NOBODY = 65534


def tensors(step: int) -> dict[str, Any]:
    """Return the state of a step: two tensors of 128 KiB and an object."""
    return {
        "first": torch.full((128, 256), float(step)),
        "second": torch.arange(2**15) + step,
        "object": {"step": step},
    }


def save(folder: Path, step: int, *, attempts: int = 1, delete: int | None = None) -> None:
    """Save one step; after its commit, delete another, as the keep policy would."""
    save_checkpoint(
        folder / f"step-{step}",
        lambda: tensors(step),
        {
            "step": step,
            "trainer": {"step": step, "tokens": 8, "recurrent_steps": 4, "architecture": {}},
            "data": {},
            "lineage": {},
        },
        group=dist.group.WORLD,
        retry=RetryPolicy(attempts, 0.2),
        on_commit=lambda: None if delete is None else discard(folder / f"step-{delete}"),
    )


def kill(*_: Any, **__: Any) -> None:
    """End this process at once, as the out-of-memory killer or a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, number: int = 1) -> Callable[[], None]:
    """Return what makes call `number` of `owner.name` kill the process before it does anything."""

    def arm() -> None:
        real, calls = getattr(owner, name), 0

        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            return kill() if calls == number else real(*arguments, **keywords)

        setattr(owner, name, counted)

    return arm


def rmtree_of_half(path: Path) -> None:
    """Delete some of the files, then die."""
    for file in sorted(path.iterdir())[:1]:
        file.unlink()
    kill()


KILLS: dict[str, Callable[[], None]] = {
    "before the first byte": at_call(saving, "save"),
    "between two tensors of a shard": at_call(filesystem, "_write_item", 2),
    "before a shard is on the disk": at_call(filesystem.os, "fsync", 1),
    "before DCP's metadata has its name": at_call(filesystem.FileSystem, "rename"),
    "before the table has its name": at_call(json_files.os, "replace"),
    "before the hashes": at_call(saving, "file_records"),
    "before the manifest": at_call(saving, "write_manifest"),
    "before the manifest has its name": at_call(json_files.os, "replace", 2),
    "before the older one is deleted": at_call(folders, "discard"),
    "after the older one lost its manifest": at_call(folders.shutil, "rmtree"),
    "with the older one half deleted": lambda: setattr(folders.shutil, "rmtree", rmtree_of_half),
}


def killed(folder: Path, arm: Callable[[], None]) -> None:
    """Save step 2, then die at a stage of saving step 4 and deleting step 2."""
    save(folder, 2)
    arm()
    # `discard` is looked up in this module, where `at_call` could not reach it.
    globals()["discard"] = folders.discard
    save(folder, 4, delete=2)


def again(folder: Path, _: Any) -> None:
    """What the restarted job does: save step 4 again, in whatever was left there."""
    save(folder, 4)


def file_size_limit(folder: Path, _: Any) -> None:
    """Write past RLIMIT_FSIZE, then raise the limit and save again."""
    save(folder, 2)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    expect_failure(folder, 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    save(folder, 6)


def full_disk(folder: Path, _: Any) -> None:
    """Fill a small file system, then free it and save again."""
    save(folder, 2)
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(bytes(2**16))
                file.flush()
        except OSError:
            pass
    expect_failure(folder, 4)
    ballast.unlink()
    save(folder, 6)


def folder_gone(folder: Path, _: Any) -> None:
    """Replace the folder by a file while training, then put it back and save again."""
    save(folder, 2)
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("not a folder")
    expect_failure(folder, 4)
    folder.unlink()
    aside.rename(folder)
    save(folder, 6)


def no_permission(folder: Path, _: Any) -> None:
    """Save as a user who may not write there."""
    save(folder, 2)
    os.seteuid(NOBODY)
    expect_failure(folder, 4)
    os.seteuid(0)
    save(folder, 6)


def passing_trouble(folder: Path, _: Any) -> None:
    """Fail once, succeed on the second attempt."""
    save(folder, 2)
    real, calls = saving.save, []

    def flaky(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return real(*arguments, **keywords)

    saving.save = flaky
    save(folder, 4, attempts=2)


def expect_failure(folder: Path, step: int) -> None:
    """Fail if the save succeeds; print what it said."""
    try:
        save(folder, step, attempts=2)
    except SaveFailedError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    else:
        raise SystemExit(f"step {step} was saved")


def in_a_child(action: Callable[[Path, Any], None], folder: Path, argument: Any = None) -> int:
    """Run `action` in a forked world of one; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            action(folder, argument)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(root: Path) -> None:
    """Meet every fault in a folder of its own; print one JSON object a fault to `root/stdout`."""
    for stream in (sys.stdout, sys.stderr):
        with (root / stream.name.strip("<>")).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    for name, arm in KILLS.items():
        folder = root / name.replace(" ", "-").replace("'", "")
        folder.mkdir()
        status = in_a_child(killed, folder, arm)
        shutil.copytree(folder, folder.with_suffix(".left"))
        restarted = in_a_child(again, folder)
        print(
            json.dumps(
                {"name": name, "folder": str(folder), "status": status, "restarted": restarted}
            ),
            flush=True,
        )
    troubles = [file_size_limit, folder_gone, passing_trouble]
    if os.geteuid() == 0:
        troubles.append(no_permission)
    if (root / "small").is_mount():
        troubles.append(full_disk)
    for trouble in troubles:
        name = trouble.__name__
        folder = root / "small" / name if trouble is full_disk else root / name
        folder.mkdir()
        status = in_a_child(trouble, folder)
        print(json.dumps({"name": name, "folder": str(folder), "status": status}), flush=True)
