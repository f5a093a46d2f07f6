"""Reading prepared data: the mixed loader beside a bare loop, at several windows and data sizes.

    python tools/bench/data.py

Everything is measured in one run, the alternatives one after the other in every repetition, and
reported as the median ratio over repetitions with its range:

- 4K windows with document positions through the loader, against a bare loop written here (memory
  map, slice, cast, positions, hash); the target is at least 0.5 of its rate. The same at 16K, 32K
  and 64K, whose cost per token must not be higher than at 4K.
- Cost per window, and of opening ten sources, at 1e6, 1e9 and 1e12 tokens a source, as a long run
  sees it: every shard has been read from before. The time in the system's open, pread and close is
  listed beside it: at 1e6 all tokens are in memory, from 1e9 on almost none, as in a long run. The
  first window of a shard, which opens its file, is timed apart. The bare loop reads the same files
  in the same rounds: if it also takes longer at a larger size, the machine is the cause (pages not
  in memory, cold processor caches); the loader's own part grows only where the ratio falls. Here
  the loop calls pread on descriptors that it keeps, the faster way: a fault in a map of a file not
  in memory takes milliseconds, since it reads the device's whole read-ahead. Tokens and indices are
  holes of sparse files: sizes are true, but no device is waited for. Holes read as token 0, which
  is not EOS here, so that every window is one document, for the loop as for the loader; only the
  last token of a source's first shard is EOS, as opening it requires.

A global batch has the same tokens at every window length. Loader and loop both keep every shard
open, 5,000 files each at 1e12; a hard limit of open files that is too low for the sizes is refused.
Refuses to run beside another load.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

# isort: split

import logging

import numpy as np
import torch
from conditions import begin, parser_of
from timing import ratios, spread

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.windows import SourceWindows, empty_batch
from titan_loop.data.open_files import open_file_limit
from titan_loop.data.source_card import ShardCard, SourceCard, SplitCard

VOCABULARY = 50_000
EOS = 0
HOLE_EOS = VOCABULARY - 1  # of sparse sources, whose tokens read as 0
MEAN_DOCUMENT = 700
GLOBAL_BATCH = 64 * 4096  # tokens, whatever the window length
WINDOWS_LENGTHS = (4096, 16384, 32768, 65536)
WEIGHTS = (0.5, 0.3, 0.2)
SHARD = 2 * 10**9  # tokens
SIZE_STEPS = 8  # global batches a measurement
SOURCES = 10  # of each size
OTHER_FILES = 1024  # what else the process opens
OPEN = "--open"


def main() -> int:
    """Measure and print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--megatokens", type=float, default=20.0, help="tokens a source")
    parser.add_argument("--tokens-each", type=float, default=8e6, help="tokens read a measurement")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e9, 1e12])
    if sys.argv[1:2] == [OPEN]:  # the benchmark itself, in a process of its own
        return _report_opening(Path(sys.argv[2]))
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    options = begin(parser, device=torch.device("cpu"))
    _require_open_files(options.sizes)
    with tempfile.TemporaryDirectory() as folder:
        sources = [
            dense_source(Path(folder) / name, int(options.megatokens * 1e6), seed)
            for seed, name in enumerate("abc")
        ]
        _compare(sources, options)
    with tempfile.TemporaryDirectory() as folder:
        _sizes(Path(folder), options)
    return 0


def _require_open_files(sizes: list[float]) -> None:
    """Exit with code 2 if the system does not let this process hold all files open."""
    shards = sum(SOURCES * -(-int(size) // SHARD) for size in sizes)
    needed, allowed = 2 * shards + OTHER_FILES, open_file_limit()
    if allowed < needed:
        print(
            f"--sizes {max(sizes):g} needs {needed} open files, the hard limit is {allowed}; raise "
            f"it (ulimit -Hn {needed}) or leave that size out",
            file=sys.stderr,
        )
        raise SystemExit(2)


def _compare(sources: list[Path], options: argparse.Namespace) -> None:
    print("\nwindow | loader Mtok/s | bare loop Mtok/s | ratio (range) | time a token to 4K's")
    reference: list[float] = []
    steps = max(1, int(options.tokens_each) // GLOBAL_BATCH)
    tokens = steps * GLOBAL_BATCH
    loaders = {length: _loader(sources, length) for length in WINDOWS_LENGTHS}
    streams = _mapped(sources)
    seconds: dict[int, list[tuple[float, float]]] = {length: [] for length in WINDOWS_LENGTHS}
    for repetition in range(options.repetitions + 1):
        for length, loader in loaders.items():
            pair = _alternate(
                lambda reader=loader: _read_steps(reader, steps),
                lambda size=length: bare_loop(streams, size, tokens // size),
                first=repetition % 2,
            )
            if repetition:  # the first touches the files
                seconds[length].append((pair[0] / tokens, pair[1] / tokens))
    for length, pairs in seconds.items():
        own, bare = ([pair[which] for pair in pairs] for which in (0, 1))
        reference = reference or own
        print(
            f"{length:6} | {1e-6 / statistics.median(own):.0f} | "
            f"{1e-6 / statistics.median(bare):.0f} | {spread(ratios(bare, own), 2)} | "
            f"{spread(ratios(own, reference), 2)}"
        )


def _read_steps(loader: WindowLoader, steps: int) -> None:
    for _ in range(steps):  # as a training loop does, which forgets a batch before the next
        loader.read_step(GLOBAL_BATCH // loader.sources[0].seq_len)


def _local_batch(length: int) -> int:
    return min(8, GLOBAL_BATCH // length)


class Streams(NamedTuple):
    """What the bare loop reads: sources whose shards are all of one length.

    Attributes:
        shards: The number of shards of each source.
        tokens: The tokens of each shard.
        eos: The id that ends a document.
        read: (source, shard, first token, count) → ids.
    """

    shards: list[int]
    tokens: int
    eos: int
    read: Callable[[int, int, int, int], np.ndarray]


def bare_loop(streams: Streams, length: int, windows: int) -> None:
    """Read windows as simply as can be: one source after the other, cuts in a shuffled order."""
    generator = np.random.default_rng()
    ordinals = np.arange(length)
    digest = b""
    rows = _local_batch(length)
    for number in range(0, windows, rows):
        inputs, positions, labels = np.empty((3, rows, length), dtype=np.int64)
        source = number // rows % len(streams.shards)
        shards = generator.integers(0, streams.shards[source], rows).tolist()
        cuts = generator.integers(0, (streams.tokens - 1) // length, rows).tolist()
        for row, (shard, cut) in enumerate(zip(shards, cuts, strict=True)):
            ids = streams.read(source, shard, cut * length, length + 1)
            inputs[row] = ids[:-1]
            labels[row] = ids[1:]
            starts = np.flatnonzero(ids[:-1] == streams.eos) + 1
            bounds = np.concatenate(([0], starts, [length]))
            positions[row] = ordinals - np.repeat(bounds[:-1], np.diff(bounds))
            labels[row, starts - 1] = -100
            name = b"%d %d %d" % (source, shard, cut)
            digest = hashlib.blake2b(digest + name, digest_size=16).digest()
        [torch.from_numpy(column) for column in (inputs, positions, labels)]


def _mapped(sources: list[Path]) -> Streams:
    """Map the shards of dense sources."""
    files = [source / "train" / "0.ds" for source in sources]
    maps = [np.memmap(file, dtype="<u2", mode="r").view(np.ndarray) for file in files]
    return Streams(
        [1] * len(maps),
        len(maps[0]),
        EOS,
        lambda source, _, first, count: maps[source][first : first + count],
    )


def _opened(sources: list[Path]) -> Streams:
    """Open the shards of sparse sources, and read from each once."""
    files = [list((source / "train").glob("*.ds")) for source in sources]
    descriptors = [[os.open(file, os.O_RDONLY) for file in of_source] for of_source in files]

    def read(source: int, shard: int, first: int, count: int) -> np.ndarray:
        data = os.pread(descriptors[source][shard], 2 * count, 2 * first)
        return np.frombuffer(data, dtype="<u2")

    for source, opened in enumerate(descriptors):
        for shard in range(len(opened)):
            read(source, shard, 0, 1)
    shards = [len(of_source) for of_source in files]
    return Streams(shards, files[0][0].stat().st_size // 2, HOLE_EOS, read)


def _sizes(folder: Path, options: argparse.Namespace) -> None:
    print(
        "\ntokens a source, ten sources | open s | MB before + added | microseconds a window | "
        "to the first size's | of it system calls | bare loop | to the first size's | "
        "bare loop over loader | first window of a shard"
    )
    sizes = {int(size): _sparse_sources(folder, int(size)) for size in options.sizes}
    loaders = {size: _loader(sources, 4096) for size, sources in sizes.items()}
    first_windows = {size: _read_every_shard(loader) for size, loader in loaders.items()}
    streams = {size: _opened(sources) for size, sources in sizes.items()}
    times: dict[int, list[_Times]] = {size: [] for size in sizes}
    for repetition in range(options.repetitions + 1):
        for size, loader in loaders.items():
            measured = _times(loader, streams[size], first=repetition % 2)
            if repetition:
                times[size].append(measured)
    reference = next(iter(times.values()))
    for size, sources in sizes.items():
        command = [sys.executable, __file__, OPEN, str(sources[0].parent)]
        opened = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        rounds = list(zip(times[size], reference, strict=True))
        columns = (
            [1e6 * here.loader for here, _ in rounds],
            [here.loader / base.loader for here, base in rounds],
            [1e6 * here.system for here, _ in rounds],
            [1e6 * here.bare for here, _ in rounds],
            [here.bare / base.bare for here, base in rounds],
            [here.bare / here.loader for here, _ in rounds],
        )
        print(
            f"{size:.0e} | {opened['seconds']:.2f} | {opened['before']} + {opened['added']} | "
            f"{' | '.join(spread(column, 2) for column in columns)} | {first_windows[size]:.0f}"
        )


class _Times(NamedTuple):
    """Seconds a window: the loader's, those of it in the system's calls, the bare loop's."""

    loader: float
    system: float
    bare: float


def _times(loader: WindowLoader, streams: Streams, first: int) -> _Times:
    system = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal system
            began = time.perf_counter()
            result = call(*arguments)
            system += time.perf_counter() - began
            return result

        return run

    def read_steps() -> None:
        calls = {name: getattr(os, name) for name in ("open", "pread", "close")}
        for name, call in calls.items():
            setattr(os, name, timed(call))
        _read_steps(loader, SIZE_STEPS)
        for name, call in calls.items():
            setattr(os, name, call)

    windows = SIZE_STEPS * GLOBAL_BATCH // 4096
    own, bare = _alternate(read_steps, lambda: bare_loop(streams, 4096, windows), first)
    return _Times(own / windows, system / windows, bare / windows)


def _read_every_shard(loader: WindowLoader) -> float:
    """Read one window of every shard, in a random order; return microseconds a window."""
    windows: list[tuple[SourceWindows, int]] = []
    for source in loader.sources:
        ends = accumulate(shard.tokens for shard in source.shards.split.shards)
        windows += [(source, (end - 1) // source.seq_len - 2) for end in ends]
    random.shuffle(windows)
    began = time.perf_counter()
    for source, number in windows:
        _, (window,) = empty_batch(1, source.seq_len)
        source.read_into(0, number, window)
    return (time.perf_counter() - began) / len(windows) * 1e6


def _report_opening(folder: Path) -> int:
    """Open and resume a mixture of all sources in `folder` in a process of its own."""
    before = _resident_megabytes()
    began = time.perf_counter()
    loader = _loader(sorted(folder.iterdir()), 4096)
    loader.windows_consumed = 10**8
    _loader(sorted(folder.iterdir()), 4096).load_state_dict(loader.state_dict())
    seconds = (time.perf_counter() - began) / 2
    added = _resident_megabytes() - before
    print(json.dumps({"seconds": seconds, "before": before, "added": added}))
    return 0


def _resident_megabytes() -> int:
    # Not the peak, which a process inherits from the one that started it.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def _alternate(one: Callable[[], object], other: Callable[[], object], first: int) -> list[float]:
    """Return the seconds of both, in this order, whichever ran first."""
    seconds = [0.0, 0.0]
    for which in (first, 1 - first):
        began = time.perf_counter()
        (one, other)[which]()
        seconds[which] = time.perf_counter() - began
    return seconds


def _loader(sources: list[Path], length: int) -> WindowLoader:
    """Return a loader without its thread: here nothing trains meanwhile."""
    weights = WEIGHTS if len(sources) == len(WEIGHTS) else [1.0] * len(sources)
    mixture = [f"{source}={weight}" for source, weight in zip(sources, weights, strict=True)]
    loader = WindowLoader.Config(mixture=mixture, prefetch=False).build(
        dp_world_size=1, dp_rank=0, seq_len=length, local_batch_size=_local_batch(length)
    )
    assert isinstance(loader, WindowLoader)  # a pipeline has another
    return loader


def dense_source(
    folder: Path,
    tokens: int,
    seed: int,
    *,
    vocabulary: int = VOCABULARY,
    mean_document: int = MEAN_DOCUMENT,
) -> Path:
    """Write a source of random tokens and documents."""
    generator = np.random.default_rng(seed)
    (folder / "train").mkdir(parents=True)
    ids = generator.integers(1, vocabulary, tokens).astype("<u2")
    ends = np.cumsum(generator.geometric(1 / mean_document, 2 * tokens // mean_document))
    ends = np.append(ends[ends < tokens], tokens)
    ids[ends - 1] = EOS
    ids.tofile(folder / "train" / "0.ds")
    ends.astype("<u8").tofile(folder / "train" / "0.ds.index")
    _write_card(folder, [_shard("0.ds", len(ends), tokens, f"{seed}")], EOS, vocabulary)
    return folder


def _sparse_sources(folder: Path, tokens: int) -> list[Path]:
    """Describe ten sources of `tokens` tokens in shards of at most SHARD: holes and one EOS."""
    shard = min(tokens, SHARD)
    documents = shard // MEAN_DOCUMENT
    sources = [folder / f"{tokens}" / f"source{number}" for number in range(SOURCES)]
    for number, source in enumerate(sources):
        (source / "train").mkdir(parents=True)
        cards = []
        for part in range(tokens // shard):
            for file, size in ((f"{part}.ds", 2 * shard), (f"{part}.ds.index", 8 * documents)):
                (source / "train" / file).touch()
                os.truncate(source / "train" / file, size)
            cards.append(_shard(f"{part}.ds", documents, shard, f"{number} {part}"))
        with (source / "train" / "0.ds").open("r+b") as first:
            first.seek(2 * (shard - 1))
            first.write(np.asarray(HOLE_EOS, "<u2").tobytes())
        _write_card(source, cards, HOLE_EOS)
    return sources


def _shard(file: str, documents: int, tokens: int, contents: str) -> ShardCard:
    sha256 = hashlib.sha256(contents.encode()).hexdigest()
    return ShardCard(file=file, documents=documents, tokens=tokens, bytes=2 * tokens, sha256=sha256)


def _write_card(
    folder: Path, shards: list[ShardCard], eos: int, vocabulary: int = VOCABULARY
) -> None:
    split = SplitCard(
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=0,
        max_token_id=vocabulary - 1,
        shards=tuple(shards),
        eos_only_at_ends=True,
    )
    SourceCard(
        name=folder.name,
        tokenizer_sha256="benchmark",
        vocab_size=vocabulary,
        eos_id=eos,
        token_bytes=2,
        splits={"train": split},
        licence="none",
        versions={},
        command="benchmark",
    ).write(folder)


if __name__ == "__main__":
    raise SystemExit(main())
