"""One persistent pool of gloo ranks per world size, shared by all tests of a session.

Importing torchtitan takes longer than most cases. One process does so for all (multiprocessing's
fork server), ranks are forked from it once and then handed one module-level function after another.
All cases share their process:
the default process group, the meshes torchtitan keeps in module state, and whatever a case leaves
in a global. The random generators are seeded alike before every case. After a case that fails there
is a new process group, after one that hangs there are new processes, so the next one starts clean.

The pool itself never imports torch; only its ranks do.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START_TIMEOUT_SECONDS = 120.0  # a cold import of torch on a busy disk
PRELOADED = ["titan_loop.testing.tiny"]  # and with it torch, torchtitan and the trainer
GRACE_SECONDS = 3.0  # for the other ranks, once one has failed
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
        reports: What is known of each failing rank: a traceback, or the stack it hung in.
    """

    def __init__(self, title: str, reports: dict[int, str]) -> None:
        self.reports = reports
        blocks = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("\n".join([title, *blocks]))


class RankTimeoutError(RankError):
    """A case did not end in time on some rank."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A rank's answer to one command: a result, or the text of a traceback."""

    result: Any = None
    error: str | None = None


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    pipe: Any  # a Connection; its name differs between platforms' stubs
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

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order.

        Args:
            fn: A function at the top level of a module that a new process can import.
            *args: Picklable arguments, the same for all ranks.
            timeout: Seconds for the case, without the start of the processes.

        Raises:
            RankError: If any rank raised or died; the message holds every rank's traceback.
            RankTimeoutError: If any rank did not end in time; the message holds its stack.
        """
        if not self._ranks:
            self._start()
        replies = self._ask(("run", fn, args), timeout, what=f"{fn.__module__}.{fn.__qualname__}")
        return [replies[rank].result for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send(None)
        deadline = time.monotonic() + GRACE_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = preloaded_context()
        folder = Path(self._folder.name)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stack_file = folder / f"stack-{rank}"
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, theirs, stack_file),
                name=f"gloo rank {rank} of {self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stack_file))
        self._join_group(START_TIMEOUT_SECONDS)

    def _join_group(self, timeout: float) -> None:
        """Give the ranks a new default process group."""
        self._group_number += 1
        store_file = Path(self._folder.name) / f"store-{self._group_number}"
        self._ask(("join", store_file, _free_port()), timeout, what="joining the process group")

    def _ask(self, command: tuple[Any, ...], timeout: float, what: str) -> dict[int, _Reply]:
        """Send a command to all ranks and collect their replies; clean up before raising."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a dead rank shows as the end of its pipe below
                rank.pipe.send(command)
        replies = self._collect(time.monotonic() + timeout)
        hung = [rank for rank in range(self.world_size) if rank not in replies]
        errors = {rank: reply.error for rank, reply in replies.items() if reply.error is not None}
        if not hung and not errors:
            return replies
        reports = errors | {rank: self._stack_of(rank) for rank in hung}
        if hung or not all(rank.process.is_alive() for rank in self._ranks):
            self._kill()
        elif command[0] == "run":
            self._join_group(START_TIMEOUT_SECONDS)
        else:
            self._kill()
        if errors:
            names = ", ".join(map(str, sorted(errors)))
            waiting = f"; rank {', '.join(map(str, hung))} was left waiting" if hung else ""
            raise RankError(f"{what} failed on rank {names}{waiting}", reports)
        names = ", ".join(map(str, hung))
        raise RankTimeoutError(f"{what} hung on rank {names} after {timeout:g} s", reports)

    def _collect(self, deadline: float) -> dict[int, _Reply]:
        """Return the replies that arrive in time; a first failure leaves the others little time."""
        replies: dict[int, _Reply] = {}
        while len(replies) < self.world_size:
            pending = {
                rank.pipe: number
                for number, rank in enumerate(self._ranks)
                if number not in replies
            }
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = pending[pipe]  # pyright: ignore[reportArgumentType]
                replies[number] = self._receive(number)
                if replies[number].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    def _receive(self, number: int) -> _Reply:
        rank = self._ranks[number]
        try:
            return rank.pipe.recv()
        except (EOFError, ConnectionResetError):
            rank.process.join(GRACE_SECONDS)
            return _Reply(error=f"the process died with exit code {rank.process.exitcode}")

    def _stack_of(self, number: int) -> str:
        """Let a hung rank write where it stands."""
        rank = self._ranks[number]
        if rank.process.pid is None or not rank.process.is_alive():
            return f"the process died with exit code {rank.process.exitcode}"
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(STACK_DUMP_SECONDS)
        return rank.stack_file.read_text() or "no stack: the rank does not run Python code"

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks.clear()


def get_pool(world_size: int) -> GlooPool:
    """Return the session's pool for this world size; it lives until the interpreter ends."""
    if world_size not in _pools:
        if not _pools:
            atexit.register(close_pools)
        _pools[world_size] = GlooPool(world_size)
    return _pools[world_size]


def close_pools() -> None:
    """End the processes of every pool."""
    for pool in _pools.values():
        pool.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, world_size: int, pipe: Any, stack_file: Path) -> None:
    """Be one rank: answer commands until the parent says None or goes away."""
    import faulthandler

    with stack_file.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                return
            except Exception:  # the case's module does not import here: that is the case's failure
                pipe.send(_Reply(error=traceback.format_exc()))
                continue
            if command is None:
                return
            pipe.send(_answer(command, rank, world_size))


def _answer(command: tuple[Any, ...], rank: int, world_size: int) -> _Reply:
    try:
        if command[0] == "join":
            _, store_file, port = command
            return _Reply(result=_join(rank, world_size, store_file, port))
        _, fn, args = command
        importlib.import_module("torch").manual_seed(0)
        return _picklable(_Reply(result=fn(*args)))
    except BaseException:  # pytest.fail and SystemExit included: the parent must hear of them
        return _Reply(error=traceback.format_exc())


def _picklable(reply: _Reply) -> _Reply:
    # Find out here, where it is still this case's error, whether the parent can be told the result.
    from multiprocessing.reduction import ForkingPickler

    ForkingPickler.dumps(reply)
    return reply


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
    )
    importlib.import_module("titan_loop.compat")  # before any other torchtitan module
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # ranks that share cores spin on each other
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(store_file), world_size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
