"""Kills training at random moments until it has survived N kills; see tools/chaos.sh.

    life: one run, started again after every kill until it is done, then compared
        even lives  one layout and save mode for all starts: losses bit for bit
        odd lives   another layout and mode at each start: losses within `LOSS_BOUND`
        two of four copy their checkpoints, and lose the local ones now and then
    reference: the same run on the same layout, uninterrupted

One process imports torch and forks everything else: an agent for each start, which forks the ranks
and treats them as torchrun does. Every record of metrics.jsonl is compared, also those of steps
that were repeated after a kill.
"""

import argparse
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.support

import titan_loop.compat as compat  # before any torchtitan module
import torch

from tests.support.failing_disk import FailingDisk
from tests.support.tiny import tiny_config, tiny_source
from titan_loop.checkpoint.folders import committed_steps, step_folder, unfinished_steps
from titan_loop.checkpoint.manager import AsyncMode
from titan_loop.errors import EXIT_USER_ERROR, exit_code
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl, write_json
from titan_loop.storage.remote_folder import RemoteFolder
from titan_loop.training.stop_request import StopListener

STEPS = 24
STAGE = "run"
EXACT = ("tokens", "lr", "recurrent_steps", "data_hash", "windows_consumed", "entropy_weight")
LOSS_BOUND = 1e-3
"""Largest relative difference of a loss from that of one process, after changes of layout. fp32
sums in another order; measured 2e-7 after 24 steps."""

LAYOUTS: dict[str, tuple[int, dict[str, int | str]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "dp2-per-visit": (2, {"fsdp": "per_visit"}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp4": (4, {}),
    "hsdp2x2": (4, {"replicate": 2}),
    "dp2-tp2": (4, {"tp": 2}),
}
MODES: tuple[AsyncMode, ...] = ("disabled", "async", "async_with_pinned_mem")
KINDS = ("rank", "all", "agent", "term", "stop", "EIO", "ENOSPC")
PASSING = ("stop", "EIO", "ENOSPC")
"""Faults that a start survives, or ends by itself."""
DISK_SIGNALS = {"EIO": signal.SIGUSR2, "ENOSPC": signal.SIGRTMIN}
"""Signals that make the run's disk fail for a rank."""
DISK_SECONDS = (0.2, 1.5)
"""Shortest and longest time in which it fails. Attempts to save and to copy take 3 s."""
MOMENTS = ("start", "step", "step", "save", "save", "upload")
"""An upload is a moment of every second life, whose checkpoints are copied to a remote folder."""
COPY_SECONDS = 0.05
"""How long a file takes on its way there, at least: a local copy would be over before the kill."""
LOST_DISKS = 0.3
"""Share of the starts after a kill that find the local checkpoints gone, where there are copies."""
PATIENCE_SECONDS = 300.0
"""Time in which a start must reach the moment of its kill, and its processes end after it."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Start:
    """One start of a run: its agent and ranks, all children or orphans of this process."""

    run: Path
    layout: str
    mode: AsyncMode
    remote: Path | None = None
    agent: int = 0
    ranks: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    disk_failed: bool = False

    def launch(self, source: Path, log: Path) -> None:
        """Fork the agent and wait until it has forked the ranks."""
        pids = log.with_suffix(".pids")
        pids.unlink(missing_ok=True)
        self.agent = os.fork()
        if self.agent == 0:
            os.setsid()
            code = 1
            with suppress(BaseException):
                code = _be_the_agent(self, source, log, pids)
            os._exit(code)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not pids.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.ranks = json.loads(pids.read_text())["pids"]

    def alive(self) -> bool:
        """Reap what has ended; return whether anything of this start still runs."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                self.ended[pid] = os.waitstatus_to_exitcode(status)
        return False

    def wait_until(self, what: Callable[[], bool]) -> bool:
        """Wait; return whether it became true before this start ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            if not self.alive():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.layout}: nothing happened in {PATIENCE_SECONDS:g} s")
            time.sleep(0.002)
        return True

    def wait_for_the_end(self) -> float:
        """Wait until no process is left; return the seconds it took."""
        began = time.monotonic()
        while self.alive():
            if time.monotonic() - began > PATIENCE_SECONDS:
                raise TimeoutError(f"{self.layout}: processes are left: {self.ranks}")
            time.sleep(0.01)
        return time.monotonic() - began

    def send(self, number: signal.Signals, pids: list[int]) -> None:
        """Send a signal to processes that may have ended."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _be_the_agent(start: Start, source: Path, log: Path, pids: Path) -> int:
    """Fork the ranks; when one fails, end the others as torchrun does; return its code."""
    world, changes = LAYOUTS[start.layout]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[int] = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                TORCHELASTIC_RUN_ID="chaos", GLOO_SOCKET_IFNAME="lo",
            )  # fmt: skip
            output = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os._exit(_be_a_rank(start, source, changes))
        ranks.append(pid)
    write_json(pids, {"pids": ranks})
    worst, running, deadline = 0, set(ranks), float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            if time.monotonic() > deadline:
                start.send(signal.SIGKILL, list(running))
            continue
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        worst = max(worst, code if code >= 0 else 128 - code)
        if code != 0 and deadline == float("inf"):
            start.send(signal.SIGTERM, list(running))
            deadline = time.monotonic() + 30  # torchrun's own
    return worst


def _be_a_rank(start: Start, source: Path, changes: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    config = tiny_config(source, start.run, steps=STEPS)
    config.training.local_batch_size = 2  # four ranks share eight windows
    config.parallelism.tensor_parallel_degree = changes.get("tp", 1)
    config.parallelism.context_parallel_degree = changes.get("cp", 1)
    config.parallelism.data_parallel_replicate_degree = changes.get("replicate", 1)
    config.fsdp.policy = changes.get("fsdp", "auto")
    config.checkpoint.async_mode = start.mode
    if start.remote is not None:
        config.checkpoint.remote = f"file://{start.remote.parent}"  # and the stage's name
        _copy_slowly()
    config.hang_seconds = 120.0
    config.checkpoint.retry_seconds = 1.0
    _fail_when_told(start.run)
    compat.skip_final_pause()
    try:
        with StopListener(grace=60.0) as listener:
            run_recipe(Recipe.of_one_run(STAGE, config), stop_listener=listener)
    except BaseException as error:
        traceback.print_exc()
        return exit_code(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _fail_when_told(run: Path) -> None:
    disk = FailingDisk(run)

    faults = {DISK_SIGNALS["EIO"]: errno.EIO, DISK_SIGNALS["ENOSPC"]: errno.ENOSPC}

    def fail(number: int, frame: object) -> None:
        disk.fault = faults[signal.Signals(number)]
        timer = threading.Timer(random.uniform(*DISK_SECONDS), lambda: setattr(disk, "fault", 0))
        timer.daemon = True
        timer.start()

    for number in faults:
        signal.signal(number, fail)


def _copy_slowly() -> None:
    upload = RemoteFolder.upload

    def slow(folder: RemoteFolder, local: Path, name: str) -> None:
        time.sleep(COPY_SECONDS)
        upload(folder, local, name)

    RemoteFolder.upload = slow  # type: ignore[method-assign]


class Chaos:
    """Lives, kills, and what came of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.kills: list[dict[str, Any]] = []
        self.lives = 0
        self.starts = 0
        self.lost_disks = 0
        self.largest_difference = 0.0
        self.source = self._prepare()

    def _prepare(self) -> Path:
        """Make the data in a process of its own: this one must not start threads."""
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                tiny_source(self.folder)
                code = 0
            os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError("the data could not be prepared")
        return self.folder / "source"

    def run(self, kills: int) -> None:
        """Live until `kills` kills have been survived."""
        while len(self.kills) < kills:
            same, copied = self.lives % 2 == 0, self.lives // 2 % 2 == 0
            layout, mode = self._draw()
            run = self.folder / f"life-{self.lives}"
            remote = self.folder / f"remote-{self.lives}" / STAGE if copied else None
            while True:
                start = self._launch(run, layout, mode, remote)
                if not self._live(start, kills):
                    break
                if remote is not None and self.random.random() < LOST_DISKS:
                    self._lose_disk(run)
                if not same:
                    layout, mode = self._draw()
            self._compare(run, layout if same else None)
            if remote is not None:
                self._compare_copies(run, remote)
            self.lives += 1
            print(f"life {self.lives}: {len(self.kills)} kills survived", flush=True)

    def _draw(self) -> tuple[str, AsyncMode]:
        return self.random.choice(list(LAYOUTS)), self.random.choice(MODES)

    def _launch(self, run: Path, layout: str, mode: AsyncMode, remote: Path | None = None) -> Start:
        start = Start(run, layout, mode, remote)
        self.starts += 1
        start.launch(self.source, self.folder / f"{run.name}.log")
        return start

    def _live(self, start: Start, kills: int) -> bool:
        """Kill a start, after stopping it for a while perhaps; return whether it must go on."""
        while len(self.kills) < kills:
            kind = self.random.choice(KINDS)
            moment = self.random.choice(MOMENTS[: None if start.remote else -1])
            if not start.wait_until(self._moment(start, moment)):
                break
            self._strike(start, kind, moment)
            if kind not in PASSING:
                return True
        start.wait_for_the_end()
        code = start.ended[start.agent]
        if code != 0 and start.disk_failed and code != EXIT_USER_ERROR:
            return True
        if code != 0:
            raise RuntimeError(f"{start.run}: a start ended with {start.ended} by itself")
        return False

    def _moment(self, start: Start, moment: str) -> Callable[[], bool]:
        directory = RunDirectory(start.run)
        if moment == "start":
            when = time.monotonic() + self.random.uniform(0, 4)
            return lambda: time.monotonic() > when
        if moment == "step":
            logged = len(read_jsonl(directory.metrics_jsonl)) + self.random.randint(1, 8)
            return lambda: len(read_jsonl(directory.metrics_jsonl)) >= logged
        folder = directory.checkpoints
        if moment == "upload":
            assert start.remote is not None
            folder = start.remote
        before = committed_steps(folder)

        def saving() -> bool:
            with suppress(OSError):  # files come and go
                unfinished = unfinished_steps(folder)
                if any(step > max(before, default=0) for step in unfinished):
                    time.sleep(self.random.uniform(0, 0.05))
                    return True
            return False

        return saving

    def _strike(self, start: Start, kind: str, moment: str) -> None:
        directory = RunDirectory(start.run)
        unfinished = unfinished_steps(directory.checkpoints)
        copying = [] if start.remote is None else unfinished_steps(start.remote)
        reached = max((r["step"] for r in read_jsonl(directory.metrics_jsonl)), default=0)
        victim = [self.random.choice(start.ranks)]
        if kind == "stop":
            start.send(signal.SIGSTOP, victim)
            time.sleep(self.random.uniform(0.2, 2))
            start.send(signal.SIGCONT, victim)
        elif kind in DISK_SIGNALS:
            start.disk_failed = True
            start.send(DISK_SIGNALS[kind], start.ranks)
        elif kind == "term":
            start.send(signal.SIGTERM, start.ranks)
        elif kind == "agent":
            start.send(signal.SIGKILL, [start.agent])
        else:
            start.send(signal.SIGKILL, victim if kind == "rank" else [start.agent, *start.ranks])
        seconds = 0.0 if kind in PASSING else start.wait_for_the_end()
        saved = max(committed_steps(directory.checkpoints), default=0)
        kill = {
            "life": self.lives, "layout": start.layout, "mode": start.mode, "kind": kind,
            "moment": moment, "step": reached, "in_save": bool(unfinished), "saved": saved,
            "in_upload": bool(copying), "end_seconds": round(seconds, 1),
        }  # fmt: skip
        self.kills.append(kill)
        with (self.folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(kill) + "\n")

    def _lose_disk(self, run: Path) -> None:
        """Delete a run's checkpoints: what was copied is all there is."""
        shutil.rmtree(RunDirectory(run).checkpoints, ignore_errors=True)
        self.lost_disks += 1

    def _compare_copies(self, run: Path, remote: Path) -> None:
        """Raise if the newest copy is not the last checkpoint, byte for byte."""
        steps = committed_steps(remote)
        here, there = (step_folder(f, STEPS) for f in (RunDirectory(run).checkpoints, remote))
        if not steps or steps[-1] != STEPS:
            raise RuntimeError(f"{remote}: the last checkpoint was not copied, {steps} were")
        for file in here.iterdir():
            if file.read_bytes() != (there / file.name).read_bytes():
                raise RuntimeError(f"{there / file.name} differs")

    def _compare(self, run: Path, layout: str | None) -> None:
        """Compare every record with the uninterrupted run's; raise if they differ."""
        reference = self.folder / f"whole-{layout or '1'}"
        if not RunDirectory(reference).run_json.exists():
            start = self._launch(reference, layout or "1", "disabled")
            start.wait_for_the_end()
        expected = {r["step"]: r for r in RunDirectory(reference).read_metrics()}
        records = read_jsonl(RunDirectory(run).metrics_jsonl)
        if not len(expected) == STEPS == len({r["step"] for r in records}):
            raise RuntimeError(f"{run}: {len(expected)} and {len(records)} records")
        for record in records:
            whole = expected[record["step"]]
            for key in EXACT:
                if record[key] != whole[key]:
                    raise RuntimeError(f"{run} step {record['step']}: {key} differs")
            difference = abs(record["loss"] - whole["loss"]) / whole["loss"]
            if difference > (0 if layout else LOSS_BOUND):
                raise RuntimeError(f"{run} step {record['step']}: loss differs by {difference:g}")
            self.largest_difference = max(self.largest_difference, difference)
        damaged = list(RunDirectory(run).checkpoints.glob("damaged-*"))
        if damaged:
            raise RuntimeError(f"{run}: {damaged}")

    def table(self) -> str:
        """Return what was survived, as a Markdown table."""
        names = {
            "rank": "SIGKILL of one rank", "all": "SIGKILL of all", "agent": "SIGKILL of the agent",
            "term": "SIGTERM", "stop": "SIGSTOP of one rank for 0.2 to 2 s",
            "EIO": "EIO for 0.2 to 1.5 s", "ENOSPC": "ENOSPC for 0.2 to 1.5 s",
        }  # fmt: skip
        lines = [
            "| fault | times | in a save | in a copy | steps repeated, mean | longest end of all |",
            "|---|---|---|---|---|---|",
        ]
        for kind in KINDS:
            part = [kill for kill in self.kills if kill["kind"] == kind]
            if part:
                lost = sum(max(0, k["step"] - k["saved"]) for k in part) / len(part)
                lines.append(
                    f"| {names[kind]} | {len(part)} | {sum(k['in_save'] for k in part)} "
                    f"| {sum(k['in_upload'] for k in part)} "
                    f"| {'-' if kind in PASSING else f'{lost:.1f}'} "
                    f"| {max(k['end_seconds'] for k in part):.1f} s |"
                )
        layouts = Counter(kill["layout"] for kill in self.kills)
        return "\n".join(
            [
                *lines,
                "",
                f"{len(self.kills)} kills in {self.lives} runs of {STEPS} steps, {self.starts} "
                f"starts, {self.lost_disks} of them after the loss of all local checkpoints; kills "
                "by layout: "
                + ", ".join(f"{name} {layouts[name]}" for name in LAYOUTS if layouts[name])
                + f". Largest relative difference of a loss: {self.largest_difference:.1e}.",
            ]
        )


def main() -> None:
    """Survive, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=8, help="number of kills to survive")
    parser.add_argument("--seed", type=int, default=0, help="for kinds, moments and layouts")
    parser.add_argument("--folder", type=Path, required=True, help="folder for everything")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans come here
    chaos = Chaos(arguments.folder, arguments.seed)
    try:
        chaos.run(arguments.kills)
    finally:
        print(chaos.table(), flush=True)


if __name__ == "__main__":
    main()
