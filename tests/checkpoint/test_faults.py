"""Real faults: a writer killed at every stage, full disks, lost folders and permissions.

The table in `titan_loop/checkpoint/README.md` lists what is shown here.
"""

import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.checkpoint.fault_driver import KILLS, main, tensors
from tests.support.multiprocess import preloaded_context
from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import committed_steps

# Until the older checkpoint is deleted, the newer one is committed already.
COMMITTED = {name for name in KILLS if "older" in name}


class Faults:
    """What the driver reported, by the name of the fault."""

    def __init__(self, root: Path) -> None:
        driver = preloaded_context().Process(target=main, args=(root,))
        driver.start()
        driver.join()
        self.log = (root / "stderr").read_text()
        assert driver.exitcode == 0, self.log
        self.reports: dict[str, dict[str, Any]] = {}
        self.refusals = ""
        for line in (root / "stdout").read_text().splitlines():
            report = json.loads(line) if line.startswith("{") else {}
            if "name" in report:
                self.reports[report["name"]] = report
            else:
                self.refusals += line + "\n"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    root = tmp_path_factory.mktemp("faults")
    root.chmod(0o755)
    small = root / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield Faults(root)
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=True)


def content(checkpoint: Path, step: int) -> dict[str, Any]:
    state = tensors(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return state


def assert_holds(folder: Path, step: int) -> None:
    """The newest whole checkpoint is that of `step`, to the last bit."""
    found = newest_good(folder, look_at="hashes")
    assert found is not None
    assert found[0] == step
    state, expected = content(folder / f"step-{step}", step), tensors(step)
    assert torch.equal(state["first"], expected["first"])
    assert torch.equal(state["second"], expected["second"])
    assert state["object"] == expected["object"]


@pytest.mark.parametrize("stage", KILLS)
def test_a_writer_killed_at_any_stage_leaves_a_whole_checkpoint(faults, stage):
    report = faults.reports[stage]
    assert report["status"] == -9
    left = Path(report["folder"]).with_suffix(".left")
    assert_holds(left, 4 if stage in COMMITTED else 2)
    # The restarted job saves the same step over whatever was left there.
    assert report["restarted"] == 0
    assert_holds(Path(report["folder"]), 4)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("file_size_limit", "could not be written to its end: no space or a size limit?"),
        ("full_disk", "No space left on device"),
        ("folder_gone", "Not a directory"),
        ("no_permission", "Permission denied"),
    ],
)
def test_a_save_that_fails_leaves_the_older_one_and_the_next_one_works(faults, trouble, words):
    if trouble not in faults.reports:
        pytest.skip("needs root and a mountable tmpfs")
    report = faults.reports[trouble]
    assert report["status"] == 0, faults.log
    assert committed_steps(Path(report["folder"])) == [2, 6]
    assert not (Path(report["folder"]) / "step-4").exists()
    assert_holds(Path(report["folder"]), 6)
    assert words in faults.refusals


def test_what_fails_once_is_tried_again(faults):
    report = faults.reports["passing_trouble"]
    assert report["status"] == 0
    assert_holds(Path(report["folder"]), 4)
    assert (
        "failed (attempt 1 of 2): OSError: [Errno 5] Input/output error"
        in faults.log + faults.refusals
    )
