"""`titan-loop doctor`: versions, devices, ranks, compiler, folders and free space, with fixes.

Every check yields `Finding`s. None starts a process group or allocates memory on a device.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_loop.cli.arguments import command
from titan_loop.errors import EXIT_CRASH, EXIT_OK, UserError
from titan_loop.launcher import slurm_job
from titan_loop.tables import columns

_PACKAGES = ["titan-loop", "torch", "torchtitan", "triton", "datatrove", "tokenizers", "numpy"]
_SMALLEST_DISK_BYTES = 2 * 10**9
_SMALLEST_MEMORY_BYTES = 2 * 10**9


@dataclass(frozen=True, slots=True)
class Finding:
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
    findings = [*check_versions(), *check_devices(), *check_launcher(os.environ)]
    findings += [*check_compiler(), *check_folders(run_directory), *check_room(run_directory)]
    for line in columns([(finding.section, finding.text) for finding in findings], left=(0, 1)):
        print(line)
    wrong = [finding for finding in findings if finding.fix is not None]
    print(f"\n{len(wrong)} problem{'' if len(wrong) == 1 else 's'} found")
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


def check_devices() -> Iterator[Finding]:
    """Report the device and the precision of a run."""
    import torch

    from titan_loop import compat

    if compat.device_type() == "cuda":
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding("device", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}, NCCL")
        yield Finding("precision", "bfloat16 mixed precision")
    else:
        yield Finding("device", "CPU, gloo", fix=_why_no_gpu(torch.version.cuda))
        yield Finding("precision", "float32")
    yield Finding("SPMD backend", compat.SPMD_BACKEND)


def _why_no_gpu(cuda_of_torch: str | None) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    if "GPU" not in listing.stdout:
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "unset CUDA_VISIBLE_DEVICES, which hides this machine's GPU"
    if cuda_of_torch is None:
        return "this machine has a GPU but torch is a CPU build: pip install a CUDA build of torch"
    return f"torch was built for CUDA {cuda_of_torch}: upgrade the NVIDIA driver to match"


def check_launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report the ranks a run would have and the threads of each."""
    from titan_loop import compat

    cores = len(os.sched_getaffinity(0))
    wanted = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [key for key in wanted if key not in environment]
    if "RANK" in environment and missing:
        problem = f"RANK={environment['RANK']} is set without {', '.join(missing)}"
        fix = "start with torchrun, or unset RANK to train on one process"
        yield Finding("launcher", problem, fix, blocks_training=True)
        return
    completed = dict(environment)
    try:
        rank, world_size = compat.start_runtime(completed)
    except UserError as error:
        yield Finding("launcher", str(error), "set it as the message says", blocks_training=True)
        return
    name = f"SLURM job {slurm_job(environment) or '?'}" if world_size > 1 else "none"
    if "RANK" in environment:
        name = "torchrun"
    local = int(completed.get("LOCAL_WORLD_SIZE", "1"))
    threads = compat.threads_per_rank(local)
    yield Finding("launcher", f"{name}: rank {rank} of {world_size}, {local} on this host")
    fix = (
        f"set OMP_NUM_THREADS={max(1, cores // local)}, or start fewer ranks here: threads that "
        "share a core wait for each other"
    )
    text = f"{threads} per rank, {local} rank{'s' if local > 1 else ''}, {cores} cores"
    yield Finding("threads", text, fix if local * threads > cores else None)
    if compat.device_type() == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if local > gpus:
            problem = f"{local} ranks on this host share {gpus} GPUs"
            fix = f"start at most {gpus} ranks a host (torchrun --nproc-per-node {gpus})"
            yield Finding("ranks", problem, fix, blocks_training=True)


def check_compiler() -> Iterator[Finding]:
    """Look for the compiler that `torch.compile` needs on this device."""
    from titan_loop import compat
    from titan_loop.distributed.compiler import missing_compiler

    text, fix = "found: torch.compile can run", None
    if missing := missing_compiler(compat.device_type()):
        text = f"{missing}: torch.compile cannot run"
        fix = "install gcc and g++, or train with --compile.no-enable"
    yield Finding("compiler", text, fix)


def check_folders(run_directory: Path) -> Iterator[Finding]:
    """Try to write to every folder that a run writes to, or to its nearest existing parent."""
    for section, folder, fix in (
        ("run directory", run_directory, "give another --dump-folder"),
        ("temporary", Path(tempfile.gettempdir()), "point TMPDIR to a writable folder"),
    ):
        existing = _existing_parent(folder)
        try:
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(b"titan_loop")
        except OSError as error:
            problem = f"{folder.absolute()}: {existing} cannot be written ({error.strerror})"
            yield Finding(section, problem, fix, blocks_training=True)
        else:
            yield Finding(section, f"{folder.absolute()} is writable")


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_room(run_directory: Path) -> Iterator[Finding]:
    """Report free disk space and free memory."""
    existing = _existing_parent(run_directory)
    free = shutil.disk_usage(existing).free
    fix = "free space, or give another --dump-folder: a checkpoint is three times the weights"
    text = f"{free / 1e9:.1f} GB free at {existing}"
    yield Finding("disk", text, fix if free < _SMALLEST_DISK_BYTES else None)
    page = os.sysconf("SC_PAGE_SIZE")
    memory, total = (page * os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    fix = "end other programs: importing torch and a small run need about 2 GB"
    text = f"{memory / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    yield Finding("memory", text, fix if memory < _SMALLEST_MEMORY_BYTES else None)
