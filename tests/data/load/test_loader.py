from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests.data.load.splits import GLOBAL_BATCH, L, load, rows
from titan_loop.data.load.held_out_windows import held_out_windows
from titan_loop.data.load.loader import WindowLoader
from titan_loop.errors import UserError


@pytest.fixture
def build(write_source, documents) -> Callable[..., WindowLoader]:
    """Return a function that builds a loader over three sources of 0.5, 0.3 and 0.2."""
    shards = {"a": [documents(1, 60, 20)], "b": [documents(2, 9, 9), documents(3, 20, 30)],
              "c": [documents(4, 30, 9)]}  # fmt: skip
    folders = [write_source(name, stored) for name, stored in shards.items()]
    return partial(load, [f"{f}={w}" for f, w in zip(folders, (0.5, 0.3, 0.2), strict=True)])


def test_a_rank_gets_its_rows_of_every_micro_batch(build):
    ordered = rows(build().read_step(GLOBAL_BATCH))
    for rank in range(2):
        batches = build(2, rank, 3).read_step(GLOBAL_BATCH)
        assert [len(labels) for _, labels in batches] == [3] * 4
        mine = [ordered[m * 6 + rank * 3 + row] for m in range(4) for row in range(3)]
        assert rows(batches) == mine


def test_seed_and_window_length_change_the_hash(build):
    hashes = {build().data_hash, build(seed=1).data_hash, build(seq_len=L + 1).data_hash}
    assert len(hashes) == 3
    one, other = build(), build(seed=1)
    assert rows(one.read_step(GLOBAL_BATCH)) != rows(other.read_step(GLOBAL_BATCH))


def test_what_the_job_repeats_is_announced(build, caplog):
    loader = build()
    per_epoch = loader.sources[2].windows_per_epoch  # the share is 0.2
    loader.log_sources(5 * per_epoch)
    assert "source c " not in caplog.text
    loader.log_sources(15 * per_epoch)
    assert (
        f"source c will be read 3.00 times: it has {per_epoch * L} of the {3 * per_epoch * L} "
        "tokens that total_tokens takes from it"
    ) in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique_tokens": 0}, "dataloader.unique_tokens=0 must be at least 1"),
        ({"unique_tokens": 9, "max_epochs": 2}, "unique_tokens=9 .* leave out max_epochs"),
        ({"dataset": "c4"}, r"dataloader\.dataset"),  # torchtitan's own
    ],
)
def test_settings_that_cannot_be(build, options, message):
    with pytest.raises(UserError, match=message):
        build(**options)


def test_held_out_windows(write_source, documents):
    folder = write_source("s", [documents(0, 5, 9)], held_out=[documents(1, 40, 9)])
    windows = held_out_windows(folder, seq_len=L, count=5)
    again = held_out_windows(folder, seq_len=L, count=5)
    assert all(torch.equal(a, b) for a, b in zip(windows[:4], again[:4], strict=True))
    assert (windows.columns, windows.whole) == ({}, ())
    assert windows.input.shape == windows.label_bytes.shape == (5, L)
    ignored = windows.labels == IGNORE_INDEX
    assert ignored.any()
    assert not windows.label_bytes[ignored].any()
    assert not windows.label_bytes[windows.labels <= 2].any()  # special tokens
    assert (windows.label_bytes[windows.labels > 2] >= 1).all()
    assert len({tuple(row) for row in windows.input.tolist()}) == 5


def test_unique_tokens_repeat_the_first_windows_in_their_order(build):
    once, again = build().read_step(7), build(unique_tokens=7 * L - 1)
    assert rows(again.read_step(18)) == [*rows(once), *rows(once), *rows(once)[:4]]
    read = np.array([source.windows for source in again.progress()])
    first, rest = build().order.counts(7), build().order.counts(4)
    assert read.tolist() == (2 * first + rest).tolist()
    # Epochs count the windows that differ, of which the sources have more.
    epochs = [source.epochs for source in again.progress()]
    assert epochs == pytest.approx((read / np.maximum(first, 1)).tolist())
    assert [d.epochs for d in again.demand(70)] == pytest.approx([10.0] * len(first), rel=0.01)
    resumed = build(unique_tokens=7 * L - 1)
    resumed.load_state_dict(again.state_dict())
    assert rows(resumed.read_step(3)) == rows(once)[4:]
    with pytest.raises(UserError, match=r"windows of dataloader\.unique_tokens 7 → None"):
        build().load_state_dict(again.state_dict())
