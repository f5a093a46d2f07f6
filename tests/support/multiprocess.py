"""One persistent pool of gloo ranks per world size, shared by all tests of a session.

Importing torchtitan takes longer than most cases, so one process does it for all of them
(multiprocessing's fork server). Ranks are forked from it once and then run one function after
another. Each rank is a `ProcessPoolExecutor` with a single worker; this module adds a group of
ranks, the stack of a rank that hangs, and a clean start after failures. torch's own multi-process
test cases start new processes for every test or class.

Ranks without a case are stopped on Linux: their gloo threads would wake up a hundred times a second
for every process group that any case has made, which took a seventh of a session.

All cases share their process: the default process group, the meshes torchtitan keeps in module
state, and every global that a case changes. The random generators are seeded alike before every
case. A case that fails is followed by a new process group, one that hangs or dies by new processes.
"""

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START_TIMEOUT_SECONDS = 600.0  # a cold import of torch on a busy disk
CASE_TIMEOUT_SECONDS = 300.0  # most take two; a slow machine ten times as long
PRELOADED = ["tests.support.preloaded"]
GRACE_SECONDS = 2.0  # for the other ranks, once one has failed
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
STACK_DUMP_SECONDS = 0.5  # faulthandler writes at once; this is for a loaded machine

_pools: dict[int, "GlooPool"] = {}


def preloaded_context() -> ForkServerContext:
    """Return a context whose processes start in milliseconds, torchtitan's trainer imported.

    They are forked from a server that has imported but run nothing, so no thread, process group or
    random state is inherited, and they do not share this process's fate or modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankError(RuntimeError):
    """A case raised, hung or died on some rank.

    Attributes:
        reports: Report of each failing rank: a traceback, or the stack it hung in.
    """

    def __init__(self, title: str, reports: dict[int, str]) -> None:
        self.reports = reports
        blocks = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("\n".join([title, *blocks]))


class RankTimeoutError(RankError):
    """A case did not end in time on some rank."""


@dataclass(slots=True)
class _Rank:
    executor: ProcessPoolExecutor
    process: BaseProcess
    stack_file: Path


class GlooPool:
    """Runs functions on `world_size` gloo processes of this host.

    The processes start with the first `run` and again after a hang or a crash.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="titan-loop-pool-")
        self._group_number = 0

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = CASE_TIMEOUT_SECONDS
    ) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order.

        Args:
            fn: A function at the top level of a module that a new process can import.
            *args: Picklable arguments, the same for all ranks.
            timeout: Seconds for the case, without the start of the processes.

        Raises:
            RankError: If any rank raised or died; the message holds every rank's traceback.
            RankTimeoutError: If any rank did not end in time; the message holds its stack.
        """
        try:
            if not self._ranks:
                self._start()
            self._send(signal.SIGCONT)
            calls = [(_run_case, fn, args)] * self.world_size
            results = self._ask(calls, timeout, what=f"{fn.__module__}.{fn.__qualname__}")
            self._send(signal.SIGSTOP)
            return results
        except RankError:
            if self._ranks:
                self._join_group()
            raise
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GlooPool":
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes of a pool that only one test uses, and delete its files."""
        self.close()
        self._folder.cleanup()

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.executor.shutdown()
        self._ranks.clear()

    def _start(self) -> None:
        context = preloaded_context()
        for rank in range(self.world_size):
            stack_file = Path(self._folder.name) / f"stack-{rank}"
            executor = ProcessPoolExecutor(1, context, _prepare_rank, (stack_file,))
            pid = executor.submit(os.getpid).result(START_TIMEOUT_SECONDS)
            process = next(child for child in context.active_children() if child.pid == pid)
            self._ranks.append(_Rank(executor, process, stack_file))
        self._join_group()

    def _join_group(self) -> None:
        """Give the ranks a new default process group."""
        self._group_number += 1
        store_file = Path(self._folder.name) / f"store-{self._group_number}"
        port = free_port()
        calls = [
            (_join, rank, self.world_size, store_file, port) for rank in range(self.world_size)
        ]
        try:
            self._ask(calls, START_TIMEOUT_SECONDS, what="joining the process group")
        except RankError:
            self.close()
            raise

    def _ask(
        self,
        calls: Sequence[tuple[Callable[..., Any], *tuple[Any, ...]]],
        timeout: float,
        what: str,
    ) -> list[Any]:
        """Make one call on each rank and return the results; a first failure ends the patience."""
        futures = [
            rank.executor.submit(*call) for rank, call in zip(self._ranks, calls, strict=True)
        ]
        done, waiting = wait(futures, timeout, FIRST_EXCEPTION)
        if waiting and any(future.exception() for future in done):
            wait(waiting, GRACE_SECONDS)
        hung = [rank for rank, future in enumerate(futures) if not future.done()]
        errors = {
            rank: self._error_of(rank, future)
            for rank, future in enumerate(futures)
            if future.done() and future.exception() is not None
        }
        if not hung and not errors:
            return [future.result() for future in futures]
        reports = errors | {rank: self._stack_of(rank) for rank in hung}
        if hung or any(rank.process.exitcode is not None for rank in self._ranks):
            self.close()
        names = ", ".join(map(str, hung))
        if not errors:
            raise RankTimeoutError(f"{what} hung on rank {names} after {timeout:g} s", reports)
        left = f"; rank {names} was left waiting" if hung else ""
        raise RankError(f"{what} failed on rank {', '.join(map(str, errors))}{left}", reports)

    def _send(self, number: signal.Signals) -> None:
        if sys.platform == "linux":  # elsewhere a stopped rank would survive its parent
            for rank in self._ranks:
                assert rank.process.pid is not None
                with suppress(ProcessLookupError):  # the next case reports a rank that died
                    os.kill(rank.process.pid, number)

    def _error_of(self, number: int, future: Future[Any]) -> str:
        error = future.exception()
        if not isinstance(error, BrokenProcessPool):
            return str(error)
        rank = self._ranks[number]
        rank.executor.shutdown()  # it reads the exit code, which can be read once
        return f"the process died with exit code {rank.process.exitcode}"

    def _stack_of(self, number: int) -> str:
        """Let a hung rank write where it stands."""
        rank = self._ranks[number]
        assert rank.process.pid is not None
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(STACK_DUMP_SECONDS)
        return rank.stack_file.read_text() or "no stack: the rank does not run Python code"


def get_pool(world_size: int) -> GlooPool:
    """Return the session's pool for this world size; it lives until `close_pools`."""
    if world_size not in _pools:
        _pools[world_size] = GlooPool(world_size)
    return _pools[world_size]


def close_pools() -> None:
    """End the processes of every pool."""
    for pool in _pools.values():
        pool.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _prepare_rank(stack_file: Path) -> None:
    """Write the stack at SIGUSR1, and end with the parent, even if that is killed."""
    faulthandler.register(signal.SIGUSR1, file=stack_file.open("w"), all_threads=False)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if sys.platform == "linux":  # the kernel also ends a stopped rank, whose `follow` sleeps
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_case(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        importlib.import_module("torch").manual_seed(0)
        return fn(*args)
    except BaseException:  # pytest.fail and SystemExit included: the parent must hear of them
        text = traceback.format_exc()  # the exception itself need not survive pickling
    raise RuntimeError(text)


def _join(rank: int, world_size: int, store_file: Path, port: int) -> None:
    """Enter a new default process group, leaving the old one if there is one."""
    if sys.platform == "linux":  # all ranks are on this host, whose own name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCH_FR_BUFFER_SIZE="2000",  # as torchtitan does
    )
    importlib.import_module("titan_loop.compat")  # before any other torchtitan module
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # ranks that share cores spin on each other
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(store_file), world_size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
