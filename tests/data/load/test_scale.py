"""Data of trillions of tokens: opened and resumed without touching it, read anywhere.

The files are sparse: their sizes and indices are valid, their tokens are holes.
"""

import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import write_card
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.open_files import OpenFiles
from titan_loop.data.shards import TokenShards, index_path
from titan_loop.data.source_card import ShardCard, SplitCard

SHARDS, SHARD_TOKENS = 100, 10**10
INDEX = np.linspace(0, SHARD_TOKENS, 101)[1:].astype("<u8")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[Path]:
    """Three sources of 10**12 tokens in a hundred shards each."""
    folders = [tmp_path_factory.mktemp("huge") / f"s{number}" for number in range(3)]
    for folder in folders:
        (folder / "train").mkdir(parents=True)
        sizes = {"documents": len(INDEX), "tokens": SHARD_TOKENS}
        cards = []
        for number in range(SHARDS):
            path = folder / "train" / f"{number}.ds"
            path.touch()
            os.truncate(path, 2 * SHARD_TOKENS)
            index_path(path).write_bytes(INDEX.tobytes())
            name = f"{folder.name} {number}"
            cards.append(ShardCard(file=path.name, bytes=2 * SHARD_TOKENS, sha256=name, **sizes))
        totals = {name: SHARDS * size for name, size in sizes.items()}
        split = SplitCard(text_bytes=0, max_token_id=9, shards=tuple(cards), **totals)
        write_card(folder, {"train": split}, vocab_size=10)
    return folders


def test_opening_and_resuming_touch_no_shard(sources):
    config = WindowLoader.Config(mixture=[f"{source}=1" for source in sources], prefetch=False)

    def build() -> WindowLoader:
        return config.build(dp_world_size=1, dp_rank=0, seq_len=4096, local_batch_size=1)

    tracemalloc.start()
    began = time.process_time()
    loader = build()
    loader.windows_consumed = 10**9
    resumed = build()
    resumed.load_state_dict(loader.state_dict())
    seconds = (time.process_time() - began) / 2
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Ten to a hundred times what it takes, so that neither depends on the machine.
    assert seconds < 1
    assert peak_bytes < 200e6
    files = resumed.sources[0].shards.files
    assert len(files) == 0
    resumed.read_step(1)
    assert len(files) <= 4  # tokens and index, of two shards where the window spans both


def test_a_process_keeps_few_files_open(sources):
    files = OpenFiles(most=8)
    shards = TokenShards(sources[0], files=files)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    for shard in range(SHARDS):
        shards.read(shard * SHARD_TOKENS, 8)
        assert len(files) <= 8
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) - descriptors <= 8
        del files, shards
        assert len(os.listdir("/proc/self/fd")) == descriptors
