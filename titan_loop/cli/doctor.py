"""`titan-loop doctor`: versions, devices, ranks, compiler, folders and free space, with fixes.

Every check yields `Finding`s. None starts a process group or allocates memory on a device.
"""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from titan_loop.cli.arguments import command
from titan_loop.errors import EXIT_CRASH, EXIT_OK, UserError
from titan_loop.launcher import slurm_job
from titan_loop.tables import columns

_PACKAGES = ["titan-loop", "torch", "torchtitan", "triton", "datatrove", "tokenizers", "numpy"]
_SMALLEST_BYTES = 2 * 10**9


class Finding(NamedTuple):
    """One line of the report; a finding with a fix is a problem."""

    section: str
    text: str
    fix: str | None = None
    blocks_training: bool = False


@command("doctor")
def run(*, run_directory: Path = Path("runs")) -> int:
    """Check this machine, and suggest a fix for every problem.

    The exit code is 1 if a problem would keep a run from training.

    Args:
        run_directory: Folder that runs will be written to.
    """
    findings = [*check_versions(), *check_device(), *check_launcher(os.environ)]
    findings += check_machine(run_directory)
    for line in columns([finding[:2] for finding in findings], left=(0, 1)):
        print(line)
    wrong = [finding for finding in findings if finding.fix is not None]
    print(f"\nproblems found: {len(wrong)}")
    for finding in wrong:
        weight = "blocks training" if finding.blocks_training else "warning"
        print(f"- {finding.section} ({weight}): {finding.text}\n  fix: {finding.fix}")
    return EXIT_CRASH if any(finding.blocks_training for finding in wrong) else EXIT_OK


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with the bounds this package declares."""
    from packaging.requirements import Requirement

    yield Finding("python", platform.python_version())
    try:
        lines = importlib.metadata.requires("titan-loop") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("titan-loop", "not installed, used from a folder", fix="pip install -e .")
        lines = []
    bounds = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, lines)
        if requirement.marker is None or requirement.marker.evaluate()
    }
    for name in dict.fromkeys((*_PACKAGES, *bounds)):
        fix = f"pip install '{name}{bounds.get(name)}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in bounds:
                yield Finding(name, "missing", fix, blocks_training=True)
            continue
        if name in bounds and not bounds[name].contains(version, prereleases=True):
            yield Finding(name, f"{version} is outside {bounds[name]}", fix, blocks_training=True)
        elif name in _PACKAGES:
            yield Finding(name, version)


def check_device() -> Iterator[Finding]:
    """Report the device and the precision of a run, and whether `torch.compile` can run on it."""
    import torch

    from titan_loop import compat
    from titan_loop.distributed.compiler import missing_compiler

    if compat.device_type() == "cuda":
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        text = f"{torch.cuda.device_count()} × {', '.join(sorted(names))}, NCCL, bfloat16"
        yield Finding("device", text)
    else:
        fix = "if this machine has a GPU, install a CUDA build of torch that its driver supports, "
        fix += "and unset CUDA_VISIBLE_DEVICES"
        hidden = fix if shutil.which("nvidia-smi") else None
        yield Finding("device", "CPU, gloo, float32", hidden)
    missing = missing_compiler(compat.device_type())
    text = f"{missing}: torch.compile cannot run" if missing else "found: torch.compile can run"
    fix = "install gcc and g++, or train with --compile.no-enable"
    yield Finding("compiler", text, fix if missing else None)


def check_launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report the ranks a run would have and the threads of each."""
    import torch

    from titan_loop import compat

    wanted = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [key for key in wanted if key not in environment]
    completed = dict(environment)
    try:
        if "RANK" in environment and missing:
            raise UserError(f"RANK={environment['RANK']} is set without {', '.join(missing)}")
        rank, world_size = compat.start_runtime(completed)
    except UserError as error:
        fix = "start with torchrun, or unset RANK to train on one process"
        yield Finding("launcher", str(error), fix, blocks_training=True)
        return
    name = f"SLURM job {slurm_job(environment) or '?'}" if world_size > 1 else "none"
    name = "torchrun" if "RANK" in environment else name
    local, cores = int(completed.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    threads = compat.threads_per_rank(local)
    yield Finding("launcher", f"{name}: rank {rank} of {world_size}, {local} on this host")
    fix = f"set OMP_NUM_THREADS={max(1, cores // local)}: threads that share a core wait"
    text = f"{threads} per rank, {local} on this host, {cores} cores"
    yield Finding("threads", text, fix if local * threads > cores else None)
    if compat.device_type() == "cuda" and local > (gpus := torch.cuda.device_count()):
        problem = f"{local} ranks on this host share {gpus} GPUs"
        fix = f"start at most {gpus} ranks a host (torchrun --nproc-per-node {gpus})"
        yield Finding("ranks", problem, fix, blocks_training=True)


def check_machine(run_directory: Path) -> Iterator[Finding]:
    """Try to write to the folders that a run writes to; report free disk space and memory."""
    existing = run_directory.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    for section, folder, fix in (
        ("run directory", existing, "give another --dump-folder"),
        ("temporary", Path(tempfile.gettempdir()), "point TMPDIR to a writable folder"),
    ):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"titan_loop")
        except OSError as error:
            problem = f"{folder} cannot be written ({error.strerror})"
            yield Finding(section, problem, fix, blocks_training=True)
        else:
            yield Finding(section, f"{folder} is writable")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for section, free, fix in (
        ("disk", shutil.disk_usage(existing).free, "free space, or give another --dump-folder"),
        ("memory", memory, "end other programs: torch and a small run need about 2 GB"),
    ):
        few = free < _SMALLEST_BYTES
        yield Finding(section, f"{free / 1e9:.1f} GB free", fix if few else None)
