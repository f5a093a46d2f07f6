"""The tables of `gpu.sh`: the question of each, the commands of its rows, and its time limit.

A row that trains is `titan-loop train ouro_scaling_study --stage SIZE-rR` with flags, on random
tokens in documents longer than a window, so that the FLOPs of the MFU are those computed. Windows
are as many as `titan-loop plan` fits into 80 GB. Other rows are the benchmarks beside this file. On
a CPU every row has a tiny shape, and rows that a CPU cannot run say why.

Last run on a GPU: 2026-11-26, one H200 with torch 2.11: five rows of `throughput`, one of `float8`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gpu_rows import (
    FOLDER,
    Row,
    planned_and_measured,
    printed_lines,
    printed_measurements,
    run_numbers,
)

BENCH = Path("tools/bench")
STUDY = "ouro_scaling_study"
TRAIN = ("-m", "titan_loop", "train", STUDY, "--dump-folder", FOLDER)
VOCABULARY, WINDOW = 32_000, 4096  # the study's
CPU_VOCABULARY, CPU_WINDOW = 128, 32
NO_CHECKPOINTS = "--checkpoint.no-enable"
NEEDS_CUDA = "needs CUDA"
ONE_GPU: Literal["one"] = "one"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine and the data of the tables.

    Attributes:
        gpus: Number of GPUs; 0 for a run on a CPU.
        gpu: Name of the GPU for `titan-loop plan`.
        machine: Device and torch's version, as records name them.
        output: Folder of the tables; the sources of random tokens are in `sources`.
    """

    gpus: int
    gpu: str
    machine: str
    output: Path

    @property
    def on_cpu(self) -> bool:
        """Whether the tables only show that their code runs."""
        return not self.gpus

    def rows_of(self, table: str) -> Path:
        """Return the folder of a table's rows, empty when the first of them starts."""
        return self.output / "rows" / table

    def source(self, documents: str) -> Path:
        """Return the folder of a source, of `whole` or `short` documents."""
        return self.output / "sources" / ("tiny" if self.on_cpu else "full") / documents


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of rows that share a time limit.

    Attributes:
        name: Name of its files.
        question: Question that it answers.
        seconds: Time after which it is stopped.
        uses: One GPU, all of them, or the host alone. Tables of one GPU run side by side where
            there are several; tables of the host follow the others, whose results they read.
        rows: Place → rows.
        absent_on_cpu: Reason to skip it on a CPU; empty if it runs there.
    """

    name: str
    question: str
    seconds: float
    uses: Literal["one", "all", "host"]
    rows: Callable[[Place], list[Row]]
    absent_on_cpu: str = ""


def trained(
    place: Place,
    name: str,
    *flags: str,
    size: str = "374m",
    steps: int = 4,
    windows: int = 4,
    checkpointing: Sequence[str] = ("none",),
    ranks: int = 1,
    shared_by: int = 1,
    documents: str = "whole",
    absent: str = "",
    environment: dict[str, str] | None = None,
) -> Row:
    """Return a row that trains a stage of the study for a few steps.

    Args:
        place: The machine.
        name: Name of the row.
        *flags: Further flags of `titan-loop train`.
        size: Size of the model; a CPU takes the smallest.
        steps: Recurrent steps R.
        windows: Windows per rank; a CPU takes two.
        checkpointing: Policy of activation checkpointing, and its flags.
        ranks: Number of processes.
        shared_by: Ranks that share a window: tensor × context parallelism.
        documents: The source.
        absent: As in `Row`.
        environment: As in `Row`.
    """
    window = WINDOW
    shape = ["--stage", f"{size}-r{steps}"]
    if place.on_cpu:
        windows, window = 2, CPU_WINDOW
        shape = ["--stage", f"53m-r{steps}", "--model.size", "debugmodel"]
        shape += ["--model.vocab-size", str(CPU_VOCABULARY)]
    length = ["--training.steps", "4" if place.on_cpu else "20", "--held-out.interval", "0"]
    batch = windows * window * (ranks // shared_by)
    words = [
        *TRAIN,
        *shape,
        *("--dataloader.mixture", f"{place.source(documents)}=1"),
        *("--training.seq-len", str(window), "--training.local-batch-size", str(windows)),
        *("--batch.global-batch-tokens", str(batch)),
        *length,
        *("--metrics.log-freq", "1" if place.on_cpu else "5"),
        *(() if "--checkpoint.async-mode" in flags else [NO_CHECKPOINTS]),
        *flags,
        *(f"activation-checkpoint:{checkpointing[0]}", *checkpointing[1:]),
    ]
    return Row(
        name=name,
        words=words,
        read=run_numbers,
        ranks=ranks,
        absent=absent,
        environment=environment or {},
    )


def compiled(place: Place) -> tuple[str, ...]:
    """Return the flags that compile layers; a CPU traces them and leaves the kernels."""
    return ("--compile.enable", *(("--compile.backend", "aot_eager") if place.on_cpu else ()))


def throughput(place: Place) -> list[Row]:
    """Train sizes at several R."""
    shapes = [
        *(("134m", 1, 8), ("134m", 4, 8)),
        *(("374m", 1, 4), ("374m", 2, 4), ("374m", 4, 4), ("374m", 8, 2)),
        *(("1.4b", 1, 2), ("1.4b", 4, 1)),
    ]
    if place.on_cpu:
        shapes = shapes[:2]
    return [
        trained(place, f"{size} R={steps}", size=size, steps=steps, windows=windows)
        for size, steps, windows in shapes
    ]


def compilation(place: Place) -> list[Row]:
    """Train without compiling, with an empty cache and with a full one; and with CUDA graphs."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(place.rows_of("compilation") / "compiled")}
    absent = "kernels are not compiled on a CPU, so there is no cache" if place.on_cpu else ""
    on, few = compiled(place), {"size": "134m", "windows": 1}  # few tokens, so that the host counts
    sdpa = ("--model.attention", "sdpa")
    no_graphs = NEEDS_CUDA if place.on_cpu else ""
    return [
        trained(place, "off", "--compile.no-enable"),
        trained(place, "on, cold", *on, environment=cache),
        trained(place, "on, warm", *on, environment=cache, absent=absent),
        trained(place, "134m, sdpa", *on, *sdpa, **few),
        trained(
            place, "134m, sdpa, graphs", *on, *sdpa, "--compile.graphs", absent=no_graphs, **few
        ),
    ]


def checkpointing(place: Place) -> list[Row]:
    """Train with every policy of activation checkpointing."""
    nested = ("recurrent-step", "--activation-checkpoint.layers", "full")
    return [
        trained(place, "selective", checkpointing=["selective"]),
        trained(place, "full", checkpointing=["full"]),
        trained(place, "recurrent-step", checkpointing=["recurrent-step"]),
        trained(place, "recurrent-step, layers full", checkpointing=nested),
        trained(place, "memory-budget", *compiled(place), checkpointing=["memory-budget"]),
    ]


def attention(place: Place) -> list[Row]:
    """Train with every attention kernel on short documents."""
    absent = NEEDS_CUDA if place.on_cpu else ""
    kernels = {"sdpa": "", "flex": absent, "varlen": absent}
    return [
        trained(place, kernel, "--model.attention", kernel, documents="short", absent=reason)
        for kernel, reason in kernels.items()
    ]


def decode(place: Place) -> list[Row]:
    """Generate with the engine and with a plain loop, and score at several depths."""
    shape = ["--size", "1.4b", "--layers", "24", "--dtype", "bfloat16", "--sweep-tokens", "2048"]
    if place.on_cpu:
        shape = ["--size", "debugmodel", "--layers", "2", "--batches", "1", "--prompt-tokens", "8"]
        shape += ["--new-tokens", "4", "--repeats", "1", "--sweep-tokens", "8"]
    words = [str(BENCH / "inference.py"), "--beside-load", *shape]
    return [Row(name=shape[1], words=words, read=printed_measurements)]


def plain(place: Place) -> list[Row]:
    """Train beside plain PyTorch, compiled too, and count the host's operator calls."""
    rows = []
    for size, steps, windows in (("374m", 4, 1), ("374m", 8, 2), ("1.4b", 4, 1)):
        shape = ["--size", size, "--seq-len", str(WINDOW), "--batch", str(windows)]
        shape += ["--compile-plain", "--pairs", "5"]
        if place.on_cpu:
            shape = ["--size", "debugmodel", "--seq-len", str(CPU_WINDOW), "--batch", "1"]
            shape += ["--no-compile", "--pairs", "1"]
        words = [str(BENCH / "plain.py"), "--beside-load", "--recurrent-steps", str(steps), *shape]
        rows.append(Row(name=f"{size} R={steps}", words=words, read=printed_lines))
    counts = [str(BENCH / "host.py"), "--beside-load", "--counts", "--no-compile", "--layers", "2"]
    host = Row(name="operator calls", words=counts, read=printed_lines)
    return [*rows[: 1 if place.on_cpu else None], host]


def before(_: Place) -> list[Row]:
    """Train beside the build from before the work on the host's part of a step."""
    words = [str(BENCH / "revisions.py"), "dfd5e2b4", "--beside-load", "--compile", "--pairs", "5"]
    words += ["--least", "0", "--tolerance", "1e-3", "--seq-len", str(WINDOW)]
    absent = "" if Path(".git").exists() else "needs the history of git"
    return [
        Row(name=f"{size} R=4", words=[*words, "--size", size], read=printed_lines, absent=absent)
        for size in ("374m", "1.4b")
    ]


def float8(place: Place) -> list[Row]:
    """Train in bf16 and in float8, beside each other."""
    shape = ["--size", "1.4b", "--seq-len", "4096", "--batch", "1", "--compile"]
    if place.on_cpu:
        shape = ["--size", "debugmodel", "--seq-len", "32", "--steps", "1", "--warmup", "1"]
    words = [str(BENCH / "throughput.py"), "--beside-load", "--recurrent-steps", "4", *shape]
    absent = "" if find_spec("torchao") else "torchao is not installed: bash tools/test_float8.sh"
    return [
        Row(name="without", words=words, read=printed_lines),
        *(
            Row(
                name=recipe,
                words=[*words, "--float8", recipe],
                read=printed_lines,
                absent=absent,
            )
            for recipe in ("rowwise", "rowwise_with_gw_hp", "tensorwise")
        ),
    ]


def assemblies(place: Place, *, ranks: int = 1) -> list[Row]:
    """Return rows that train assemblies no device has run, on one rank or several."""
    absent = NEEDS_CUDA if place.on_cpu else ""
    on, row = compiled(place), partial(trained, place, ranks=ranks)
    pinned = ("--checkpoint.interval", "2" if place.on_cpu else "10")
    pinned += ("--checkpoint.async-mode", "async_with_pinned_mem")
    kernel, precision = ("sdpa", "fp32") if place.on_cpu else ("flex", "bf16")
    first = f"{kernel}, selective, compile, FSDP, {precision}"
    return [
        row(first, *on, "--model.attention", kernel, checkpointing=["selective"]),
        # torchtitan asks for a process group of "cpu:gloo,cpu:gloo" where there is no GPU.
        row("CPU offload", "--training.enable-cpu-offload", absent=absent),
        row("async_with_pinned_mem", *pinned, absent=absent),
        row("Muon", "--optimizer.name", "muon"),
    ]


def assemblies_all(place: Place) -> list[Row]:
    """Train the assemblies on all ranks, and those that several ranks make."""
    ranks = place.gpus or 4
    rows = assemblies(place, ranks=2)[:1] if place.on_cpu else assemblies(place, ranks=ranks)
    context = ("--parallelism.context-parallel-degree", "2")
    tensor = ("--parallelism.tensor-parallel-degree", "2")
    replicas = ("--parallelism.data-parallel-replicate-degree", "2")
    row, on = partial(trained, place, shared_by=2), compiled(place)
    eager = place.on_cpu  # four ranks that share two cores trace for a minute
    return [
        *rows,
        row("CP: the mask's closure, compile", *on, *context, ranks=2 if place.on_cpu else ranks),
        row(
            "HSDP × TP" if eager else "HSDP × TP, compile",
            *(*replicas, *tensor, *(() if eager else on)),
            ranks=ranks,
            absent=f"needs 4 GPUs, found {ranks}" if ranks < 4 else "",
        ),
    ]


def spread(place: Place) -> list[Row]:
    """Train on all ranks in every layout."""
    ranks = place.gpus or 2
    half = {"size": "1.4b", "windows": 2, "ranks": ranks, "shared_by": 2}
    whole = {"size": "1.4b", "windows": 1, "ranks": ranks}
    rows = [
        trained(place, "374m FSDP", ranks=ranks),
        trained(place, "1.4b FSDP per_visit", "--fsdp.policy", "per_visit", **whole),
        trained(place, "1.4b FSDP per_step", "--fsdp.policy", "per_step", **whole),
        trained(place, "1.4b HSDP", "--parallelism.data-parallel-replicate-degree", "2", **whole),
        trained(place, "1.4b TP 2", "--parallelism.tensor-parallel-degree", "2", **half),
        trained(place, "1.4b CP 2", "--parallelism.context-parallel-degree", "2", **half),
    ]
    return rows[1:2] if place.on_cpu else rows


def parity(place: Place) -> list[Row]:
    """Compare every layout's losses and gradients with one process on a CPU."""
    script, expected = str(BENCH / "nccl_parity.py"), str(place.output / "expected.pt")
    few = ["--cases", "R1", "R-changes-full"] if place.on_cpu else []
    made = Row(
        name="one process on a CPU",
        words=[script, "--expect", expected, *few],
        read=lambda *_: [],
        environment={"CUDA_VISIBLE_DEVICES": ""},
    )
    rows = [made]
    for kernel in ("sdpa",) if place.on_cpu else ("sdpa", "flex"):
        for world in (2,) if place.on_cpu else (2, 4, 8):
            missing = not place.on_cpu and place.gpus < world
            rows.append(
                Row(
                    name=f"{world} ranks, {kernel}",
                    words=[script, "--against", expected, "--attention", kernel, *few],
                    read=printed_lines,
                    ranks=world,
                    absent=f"needs {world} GPUs, found {place.gpus}" if missing else "",
                )
            )
    return rows


def memory(place: Place) -> list[Row]:
    """Plan the rows that were measured, and compare the peaks."""
    rows = []
    tables = ["throughput", "spread" if place.gpus > 1 else "checkpointing"]
    for table in tables[:1] if place.on_cpu else tables:
        measured = place.output / f"{table}.json"
        for row in TABLES[table].rows(place)[-1 if place.on_cpu else 0 :]:
            cluster = ["--nodes", "1", "--gpus-per-node", str(row.ranks), "--gpu", place.gpu]
            # A rehearsal needs the manager of checkpoints.
            flags = [word for word in row.words[len(TRAIN) :] if word != NO_CHECKPOINTS]
            rows.append(
                Row(
                    name=f"{table}: {row.name}",
                    words=["-m", "titan_loop", "plan", STUDY, *cluster, *flags],
                    read=partial(planned_and_measured, measured=measured, row=row.name),
                    environment={"CUDA_VISIBLE_DEVICES": ""},
                )
            )
    return rows


TABLES = {
    table.name: table
    for table in (
        Table(
            name="throughput",
            question="Tokens/s, MFU and peak memory by size and R, on one GPU",
            seconds=420,
            uses=ONE_GPU,
            rows=throughput,
        ),
        Table(
            name="checkpointing",
            question="Speed and memory of every policy of activation checkpointing",
            seconds=270,
            uses=ONE_GPU,
            rows=checkpointing,
        ),
        Table(
            name="compilation",
            question="Speed and start with and without compiled layers, and with CUDA graphs",
            seconds=240,
            uses=ONE_GPU,
            rows=compilation,
        ),
        Table(
            name="attention",
            question="Speed of the attention kernels on short documents",
            seconds=150,
            uses=ONE_GPU,
            rows=attention,
        ),
        Table(
            name="decode",
            question="Generation beside a plain loop, early exit, caches and depth sweep",
            seconds=150,
            uses=ONE_GPU,
            rows=decode,
        ),
        Table(
            name="plain",
            question="A training step beside plain PyTorch's",
            seconds=300,
            uses=ONE_GPU,
            rows=plain,
        ),
        Table(
            name="before",
            question="A training step beside an earlier build's",
            seconds=300,
            uses=ONE_GPU,
            rows=before,
            absent_on_cpu="CI's checkout may lack the commit",
        ),
        Table(
            name="float8",
            question="A training step with the layers' products in float8 beside bf16",
            seconds=120,
            uses=ONE_GPU,
            rows=float8,
        ),
        Table(
            name="assemblies",
            question="Do assemblies run that no device has run, on one GPU?",
            seconds=210,
            uses=ONE_GPU,
            rows=assemblies,
        ),
        Table(
            name="spread",
            question="Speed of layouts over all GPUs",
            seconds=330,
            uses="all",
            rows=spread,
        ),
        Table(
            name="assemblies_all",
            question="Do assemblies run that no device has run, on all GPUs?",
            seconds=370,
            uses="all",
            rows=assemblies_all,
        ),
        Table(
            name="parity",
            question="Losses and gradients of every layout of ranks beside one process",
            seconds=300,
            uses="all",
            rows=parity,
        ),
        Table(
            name="memory",
            question="Measured peaks beside the peaks of titan-loop plan",
            seconds=330,
            uses="host",
            rows=memory,
        ),
    )
}
"""All tables by name, in the order in which they run."""
