"""Reading prepared data: the mixed loader beside a bare loop, at several windows and data sizes.

    python tools/bench/data.py

Everything is measured in one run, the alternatives one after the other in every repetition, and
reported as the median ratio over repetitions with its range:

- 4K windows with document positions through the loader, against a bare loop written here (memory
  map, slice, cast, positions, hash); the target is at least 0.5 of its rate. The same at 16K, 32K
  and 64K, whose cost per token must not be higher than at 4K.
- torchtitan's text loader on raw JSONL, which tokenises while it reads.
- Cost per window, and of opening ten sources, at 1e6, 1e9 and 1e12 tokens a source, as a long run
  sees it: every shard has been read from before. Beside it what of that the system's open, pread
  and close take: at 1e6 all tokens are in memory, from 1e9 on almost none, as in a long run. The
  first window of a shard, which opens its files, is timed apart. Tokens are holes of sparse files,
  indices are real and, within a source, one file under many names: sizes and searches are true, but
  no device is waited for.

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
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

# isort: split

import logging

import numpy as np
import torch
from conditions import add_load_flag, machine, require_quiet_machine

from titan_loop.data.loader import WindowLoader
from titan_loop.data.source_card import ShardCard, SourceCard, SplitCard
from titan_loop.data.text_stream import TextStreamLoader
from titan_loop.data.tokenizer import train_tokenizer
from titan_loop.data.windows import SourceWindows

VOCABULARY = 50_000
EOS = 0
MEAN_DOCUMENT = 700
LOCAL_BATCH, GLOBAL_BATCH = 8, 64
WINDOWS_LENGTHS = (4096, 16384, 32768, 65536)
WEIGHTS = (0.5, 0.3, 0.2)
SHARD = 10**9  # tokens
SIZE_STEPS = 8  # global batches a measurement


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--megatokens", type=float, default=20.0, help="tokens a source")
    parser.add_argument("--tokens-each", type=float, default=8e6, help="tokens read a measurement")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e9, 1e12])
    add_load_flag(parser)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)  # used by the benchmark itself
    options = parser.parse_args()
    if options.open is not None:
        return _report_opening(options.open)
    require_quiet_machine(options)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("command:", "python", " ".join(sys.argv))
    print("machine:", machine())
    with tempfile.TemporaryDirectory() as folder:
        sources = [
            _dense_source(Path(folder) / name, int(options.megatokens * 1e6), seed)
            for seed, name in enumerate("abc")
        ]
        _compare(sources, options)
        _text_loader(Path(folder), sources, options)
    with tempfile.TemporaryDirectory() as folder:
        _sizes(Path(folder), options)
    return 0


def _compare(sources: list[Path], options: argparse.Namespace) -> None:
    print("\nwindow | loader Mtok/s | bare loop Mtok/s | ratio (range) | time a token to 4K's")
    reference: list[float] = []
    loaders = {length: _loader(sources, length) for length in WINDOWS_LENGTHS}
    seconds: dict[int, list[tuple[float, float]]] = {length: [] for length in WINDOWS_LENGTHS}
    for repetition in range(options.repetitions + 1):
        for length, loader in loaders.items():
            steps = max(1, int(options.tokens_each) // (GLOBAL_BATCH * length))
            pair = _alternate(
                lambda n=steps, reader=loader: [reader.read_step(GLOBAL_BATCH) for _ in range(n)],
                lambda n=steps, size=length: bare_loop(sources, size, n * GLOBAL_BATCH),
                first=repetition % 2,
            )
            if repetition:  # the first touches the files
                tokens = steps * GLOBAL_BATCH * length
                seconds[length].append((pair[0] / tokens, pair[1] / tokens))
    for length, pairs in seconds.items():
        own = [pair[0] for pair in pairs]
        reference = reference or own
        ratios = [bare / mine for mine, bare in pairs]
        against = [mine / first for mine, first in zip(own, reference, strict=True)]
        print(
            f"{length:6} | {1e-6 / statistics.median(own):.0f} | "
            f"{1e-6 / statistics.median(pair[1] for pair in pairs):.0f} | {_range(ratios)} | "
            f"{_range(against)}"
        )


def bare_loop(sources: list[Path], length: int, windows: int) -> None:
    """Read windows as simply as can be: one source after the other, cuts in a shuffled order."""
    maps = [np.memmap(source / "train" / "0.ds", dtype="<u2", mode="r") for source in sources]
    generator = np.random.default_rng(0)
    ordinals = np.arange(length)
    digest = b""
    for number in range(0, windows, LOCAL_BATCH):
        inputs, positions, labels = np.empty((3, LOCAL_BATCH, length), dtype=np.int64)
        source = number // LOCAL_BATCH % len(maps)
        stream = maps[source]
        cuts = generator.integers(0, (len(stream) - 1) // length, LOCAL_BATCH).tolist()
        for row, cut in enumerate(cuts):
            ids = stream[cut * length : (cut + 1) * length + 1].view(np.ndarray)
            inputs[row] = ids[:-1]
            labels[row] = ids[1:]
            starts = np.flatnonzero(inputs[row] == EOS) + 1
            bounds = np.concatenate(([0], starts, [length]))
            positions[row] = ordinals - np.repeat(bounds[:-1], np.diff(bounds))
            labels[row, starts - 1] = -100
            digest = hashlib.blake2b(digest + b"%d %d" % (source, cut), digest_size=16).digest()
        [torch.from_numpy(column) for column in (inputs, positions, labels)]


def _text_loader(folder: Path, sources: list[Path], options: argparse.Namespace) -> None:
    """Compare with torchtitan's loader, which tokenises raw text while it reads."""
    text = folder / "text"
    text.mkdir()
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    lines = [json.dumps({"text": path.read_text(errors="replace")}) for path in files]
    (text / "text.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = train_tokenizer([text / "text.jsonl"], vocab_size=8192, output=folder)
    streamed = TextStreamLoader.Config(dataset_path=str(text), tokenizer=str(tokenizer)).build(
        dp_world_size=1, dp_rank=0, seq_len=4096, local_batch_size=LOCAL_BATCH
    )
    streamed.read_step(LOCAL_BATCH)
    loader = _loader(sources, 4096)
    ratios, rates = [], []
    for repetition in range(options.repetitions):
        mine, theirs = _alternate(
            lambda: loader.read_step(GLOBAL_BATCH),
            lambda: streamed.read_step(GLOBAL_BATCH),
            first=repetition % 2,
        )
        ratios.append(theirs / mine)
        rates.append(GLOBAL_BATCH * 4096 / theirs)
    print(
        f"\ntorchtitan's text loader, 4096: {statistics.median(rates) / 1e6:.2f} Mtok/s; the "
        f"loader reads prepared tokens {_range(ratios)} times as fast"
    )


def _sizes(folder: Path, options: argparse.Namespace) -> None:
    print(
        "\ntokens a source, ten sources | open s | MB before + added | microseconds a window | "
        "to the first size's | of it system calls | the rest to the first size's | "
        "first window of a shard"
    )
    sizes = {int(size): _sparse_sources(folder, int(size)) for size in options.sizes}
    loaders = {size: _loader(sources, 4096) for size, sources in sizes.items()}
    first_windows = {size: _read_every_shard(loader) for size, loader in loaders.items()}
    seconds: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for repetition in range(options.repetitions + 1):
        for size, loader in loaders.items():
            pair = _own_and_system(loader)
            if repetition:
                seconds[size].append(pair)
    reference = next(iter(seconds.values()))
    for size, sources in sizes.items():
        command = [sys.executable, __file__, "--open", str(sources[0].parent)]
        opened = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        pairs = list(zip(seconds[size], reference, strict=True))
        print(
            f"{size:.0e} | {opened['seconds']:.2f} | {opened['before']} + {opened['added']} | "
            f"{_range([1e6 * sum(pair) for pair in seconds[size]])} | "
            f"{_range([sum(pair) / sum(base) for pair, base in pairs])} | "
            f"{_range([1e6 * system for _, system in seconds[size]])} | "
            f"{_range([pair[0] / base[0] for pair, base in pairs])} | {first_windows[size]:.0f}"
        )


def _own_and_system(loader: WindowLoader) -> tuple[float, float]:
    """Return the seconds a window takes outside and inside the system's calls."""
    inside = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal inside
            began = time.perf_counter()
            result = call(*arguments)
            inside += time.perf_counter() - began
            return result

        return run

    calls = {name: getattr(os, name) for name in ("open", "pread", "close")}
    for name, call in calls.items():
        setattr(os, name, timed(call))
    began = time.perf_counter()
    for _ in range(SIZE_STEPS):
        loader.read_step(GLOBAL_BATCH)
    seconds = time.perf_counter() - began
    for name, call in calls.items():
        setattr(os, name, call)
    windows = SIZE_STEPS * GLOBAL_BATCH
    return (seconds - inside) / windows, inside / windows


def _read_every_shard(loader: WindowLoader) -> float:
    """Read one window of every shard, in a random order; return microseconds a window."""
    windows: list[tuple[SourceWindows, int]] = []
    for source in loader.sources:
        ends = accumulate(shard.tokens for shard in source.shards.split.shards)
        windows += [(source, (end - 1) // source.seq_len - 2) for end in ends]
    random.shuffle(windows)
    began = time.perf_counter()
    for source, number in windows:
        source.read(0, number)
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
    return WindowLoader.Config(mixture=mixture, prefetch=False).build(
        dp_world_size=1, dp_rank=0, seq_len=length, local_batch_size=LOCAL_BATCH
    )


def _dense_source(folder: Path, tokens: int, seed: int) -> Path:
    """Write a source of random tokens and documents."""
    generator = np.random.default_rng(seed)
    (folder / "train").mkdir(parents=True)
    ids = generator.integers(1, VOCABULARY, tokens).astype("<u2")
    ends = _document_ends(generator, tokens)
    ids[ends - 1] = EOS
    ids.tofile(folder / "train" / "0.ds")
    ends.astype("<u8").tofile(folder / "train" / "0.ds.index")
    _write_card(folder, [_shard("0.ds", len(ends), tokens, f"{seed}")])
    return folder


def _sparse_sources(folder: Path, tokens: int) -> list[Path]:
    """Describe ten sources of `tokens` tokens in shards of at most SHARD; holes read as token 0."""
    shard = min(tokens, SHARD)
    sources = [folder / f"{tokens}" / f"source{number}" for number in range(10)]
    for number, source in enumerate(sources):
        (source / "train").mkdir(parents=True)
        ends = _document_ends(np.random.default_rng(number), shard)
        index = source / "train" / "0.ds.index"
        ends.astype("<u8").tofile(index)
        cards = []
        for part in range(tokens // shard):
            file = source / "train" / f"{part}.ds"
            file.touch()
            os.truncate(file, 2 * shard)
            if part:
                file.with_name(f"{file.name}.index").hardlink_to(index)
            cards.append(_shard(file.name, len(ends), shard, f"{number} {part}"))
        _write_card(source, cards)
    return sources


def _document_ends(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Return ascending document ends, the last at `tokens`."""
    ends = np.cumsum(generator.geometric(1 / MEAN_DOCUMENT, 2 * tokens // MEAN_DOCUMENT))
    return np.append(ends[ends < tokens], tokens)


def _shard(file: str, documents: int, tokens: int, contents: str) -> ShardCard:
    sha256 = hashlib.sha256(contents.encode()).hexdigest()
    return ShardCard(file=file, documents=documents, tokens=tokens, bytes=2 * tokens, sha256=sha256)


def _write_card(folder: Path, shards: list[ShardCard]) -> None:
    split = SplitCard(
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=0,
        max_token_id=VOCABULARY - 1,
        shards=tuple(shards),
    )
    SourceCard(
        name=folder.name,
        tokenizer_sha256="benchmark",
        vocab_size=VOCABULARY,
        eos_id=EOS,
        token_bytes=2,
        splits={"train": split},
        licence="none",
        versions={},
        command="benchmark",
    ).write(folder)


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
