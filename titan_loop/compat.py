"""Every shim for torch and torchtitan versions and for running without an accelerator.

Import this module before any torchtitan module. torchtitan 0.3.0 chooses its device at import time,
and copies that choice into its other modules. Each shim names the code it replaces and the
condition for its removal.
"""

import importlib
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import init_logger
from torchtitan.tools.logging import logger as titan_logger

from titan_loop.errors import UserError
from titan_loop.launcher import current_task, is_in_step
from titan_loop.light_imports import import_lightly

DeviceType = Literal["cpu", "cuda"]

SPMD_BACKEND = "partial_dtensor"
"""Default everywhere, since CI tests it; "spmd_types" is a switch for torch 2.15 and later."""


class CpuDevice:
    """The part of `torch.cuda`'s interface that torchtitan calls, for host memory.

    Memory figures are the resident set of this process. Delete when torchtitan runs on CPU by
    itself (not in 0.3.0).
    """

    set_device = staticmethod(lambda device: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    synchronize = staticmethod(lambda device=None: None)  # operations on the host are synchronous
    empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda device=None: "CPU")

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        """Return an object with `total_memory` in bytes."""
        return SimpleNamespace(
            name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    @staticmethod
    def reset_peak_memory_stats(device: torch.device | None = None) -> None:
        """Start a new peak where the kernel allows it (Linux, `/proc/self/clear_refs`).

        Elsewhere, as in some containers, a peak stays the peak since the process started.
        """
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        """Return the process' peak resident bytes under the names torchtitan reads."""
        peak = peak_resident_bytes()
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process in bytes, since the last reset if any."""
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_assumed_device: DeviceType | None = None


def device_type() -> DeviceType:
    """Return torchtitan's device, or the one that is assumed."""
    if _assumed_device is not None:
        return _assumed_device
    return "cuda" if titan_utils.device_type == "cuda" else "cpu"


@contextmanager
def assuming(device: DeviceType) -> Iterator[None]:
    """Give configs the defaults and checks of another device, such as a cluster's."""
    global _assumed_device
    before, _assumed_device = _assumed_device, device
    try:
        yield
    finally:
        _assumed_device = before


def _profile_outside_of_checkpointing() -> None:
    # Selective checkpointing looks for every operation of a recomputed layer among those of its
    # forward pass. FSDP's hooks of a unit inside a layer record one profiler range more then.
    # Delete when torch leaves ranges out of this by itself (not in 2.13).
    profiler = torch.ops.profiler
    for packet in (profiler._record_function_enter_new, profiler._record_function_exit):
        SAC_IGNORED_OPS.update(getattr(packet, name) for name in packet.overloads())


if not torch.cuda.is_available():
    titan_utils.device_type = "cpu"
    titan_utils.device_module = CpuDevice()  # type: ignore[assignment]
    titan_utils.get_local_device = lambda: torch.device("cpu")
    # Upstream answers 312 TFLOP/s (an A100) for every device that it does not know.
    titan_utils.get_peak_flops = lambda device_name: float("nan")
    # torchtitan 0.3.0's router asks for autocast to fp32, which torch does not know on CPU; weights
    # are fp32 there. Delete when either does without the warning.
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
# The engine's attention addresses keys by sparse rows, which torch calls beta.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
if "set_timeout" not in vars(dist):
    # torchtitan calls it after the first step. Delete when torch < 2.14 is no longer supported.
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
_profile_outside_of_checkpointing()
import_lightly(compiler=torch.cuda.is_available())


def sum_gradients_as_declared(unit: nn.Module) -> None:
    """Let autograd cast every contribution to a gradient of an FSDP unit to its `grad_dtype`.

    torch 2.15's FSDP resets `grad_dtype` before each backward pass, to save a cast per parameter:
    the contributions of all visits would be added up in the compute dtype. Delete when it does not.
    """
    if not isinstance(unit, FSDPModule):
        return
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        if "_fsdp_params_with_wider_grad_dtype" in vars(group):  # absent before 2.15
            vars(group)["_fsdp_params_with_wider_grad_dtype"] = []


def gather_at_every_visit(modules: Sequence[nn.Module]) -> None:
    """Let FSDP treat every call of one of the modules of a `fully_shard` as a visit of the unit.

    torch 2.13's FSDP counts a group as visited when each of its modules has run once. A second call
    of one of them would be gathered for, but its output would not bring the weights back in the
    backward pass, nor would they be freed after it. Delete when a module of a group may be called
    more often than the others.
    """
    assert isinstance(modules[0], FSDPModule)
    state = modules[0]._get_fsdp_state()
    state._pre_forward_hook_handle.remove()  # removes all hooks of the group
    for module in modules:
        module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(state._post_forward, prepend=False)


def start_runtime(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> tuple[int, int]:
    """Complete the launcher's variables, set this process' threads, return rank and world size.

    Under torchrun nothing changes. Under `srun` without torchrun the SLURM variables are
    translated. A process started by hand becomes a world of one with a free port. Raises
    `UserError` if a variable that the launcher should have set is missing.
    """
    task = current_task(environment) if is_in_step(environment) else None
    if "RANK" not in environment and task is not None:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise UserError(
                    f"{name} is not set: under srun export the first node's name as MASTER_ADDR "
                    "and a free port as MASTER_PORT"
                )
        for name in ("rank", "world_size", "local_rank", "local_world_size"):
            environment[name.upper()] = str(getattr(task, name))
    for name in ("WORLD_SIZE", "LOCAL_RANK") if "RANK" in environment else ():
        if name not in environment:
            raise UserError(f"RANK is set but {name} is not; start with torchrun, or set both")
    _check_launch(environment)
    if "RANK" not in environment:
        environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        # A world of one meets nobody: port 0 lets the store pick a free one, so that runs can share
        # a host.
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device_type() == "cpu":
        ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(threads_per_rank(ranks))
        if ranks > 1:
            use_batch_scheduling()
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def use_batch_scheduling() -> None:
    """Give this thread and those it starts Linux's batch policy, unless it has one of its own.

    Otherwise a receiver that wakes may preempt the sending thread while that holds a lock of
    gloo's, on which gloo's own thread then spins. A batch thread preempts nobody when it wakes.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _check_launch(environment: Mapping[str, str]) -> None:
    """Raise `UserError` unless a launcher's variables are numbers that go together."""
    most = {"MASTER_PORT": 65_535}
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = environment.get(name, "0")
        if not (text.isascii() and text.isdecimal() and int(text) <= most.get(name, 1 << 31)):
            raise UserError(f"{name}={text!r} is not a number that a launcher sets; use torchrun")
        numbers[name] = int(text)
    if "RANK" not in environment and numbers["WORLD_SIZE"] > 1:
        raise UserError(
            f"WORLD_SIZE={numbers['WORLD_SIZE']} is set but RANK is not: this process would train "
            "alone; start with torchrun, or unset it"
        )
    if "RANK" in environment and not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise UserError(
            f"RANK={numbers['RANK']} is not below WORLD_SIZE={numbers['WORLD_SIZE']}; use torchrun"
        )


def dump_flight_recorder(path: Path) -> None:
    """Write the last collectives of this process as the pickle that `torchfrtrace` reads."""
    # torch's dump of NCCL's collectives, or gloo's; delete when it has a public name.
    name = "_dump_nccl_trace" if dist.is_nccl_available() else "_dump_fr_trace"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(vars(importlib.import_module("torch._C._distributed_c10d"))[name]())


_UPSTREAM_NOISE = (
    "Trainer is initialized with",  # speaks of step-based schedules that do not exist here
    "Peak FLOPS used for computing MFU",  # an A100's figure for every unknown device
    "Sleeping 2 seconds",
    "torch.distributed is already initialized",  # by the stage before, as it should be
    "Training completed",  # also where `training.steps` cut it; `run.py` says what was done
    "Structured logging disabled",
    "[GC] ",
    "Building device mesh with",  # again below, with the names of the dimensions
    "Synchronizing and adjusting timeout",
    "CPU capacity",
    "While redistributing from (_NormPartial",  # torch, of the norm that clips: two numbers a step
)


def _is_ours(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if message.startswith("ENV[TORCH_NCCL_") and device_type() == "cpu":
        return False  # gloo has no such variables
    if message.startswith("Optimizer "):
        record.msg = message.replace("'lr': 0.0, ", "")  # the schedule's rates come later
        record.args = None
    return not message.startswith(_UPSTREAM_NOISE)


def quiet_upstream() -> None:
    """Drop the few lines torchtitan 0.3.0 prints that would mislead a reader of our logs."""
    # A logger's filter does not see what its children log; a handler's does. Torch has its own.
    torchs = logging.getLogger("torch.distributed.tensor._redistribute")
    for place in (titan_logger, *titan_logger.handlers, torchs):
        place.addFilter(_is_ours)  # adding it twice changes nothing
    # Parity tests hold there; torch speaks of random operators in general.
    warnings.filterwarnings("ignore", r"DTensor .* may not have complete support on cpu")


def start_logging(rank: int) -> None:
    """Log to the terminal: rank 0's messages, and every rank's warnings."""
    init_logger()
    if rank > 0:
        for handler in titan_logger.handlers:
            handler.setLevel(logging.WARNING)
    quiet_upstream()


def skip_final_pause() -> None:
    """Let the training loop of a world of one end at once.

    torchtitan 0.3.0 has rank 0 sleep two seconds for the others. Delete when it does not.
    """
    trainer = importlib.import_module("torchtitan.trainer")
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    vars(trainer)["time"] = clock


def threads_per_rank(local_world_size: int) -> int:
    """Return the number of threads of a rank: OMP_NUM_THREADS, or its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    # Ranks whose threads overlap on the same cores spin on each other: 10 to 40 times slower.
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_world_size))
