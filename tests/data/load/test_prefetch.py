"""The prefetching thread: what it read is not consumed, and it leaves nothing behind."""

import json
from pathlib import Path

import pytest
import torch

from tests.data.load.splits import L, load
from titan_loop.data.load.loader import WindowLoader
from titan_loop.errors import UserError


@pytest.fixture
def source(write_source, documents) -> Path:
    return write_source("a", [documents(1, 30, 20), documents(2, 30, 20)])


def labels_of(loader: WindowLoader, windows: int) -> torch.Tensor:
    return torch.cat([labels for _, labels in loader.read_step(windows)])


def test_a_changing_batch_and_a_resume_read_what_no_thread_would(source):
    ahead, plain = (load([str(source)], local_batch=2, prefetch=on) for on in (True, False))
    for windows in (4, 4, 6, 2, 2, 8):
        assert torch.equal(labels_of(ahead, windows), labels_of(plain, windows))
        assert ahead.state_dict() == plain.state_dict()
    state = json.loads(json.dumps(ahead.state_dict()))
    after = labels_of(ahead, 4)
    ahead.load_state_dict(state)
    assert torch.equal(labels_of(ahead, 4), after)
    ahead.close()


def test_an_error_in_the_thread_is_raised_where_the_batch_is_taken(source):
    loader = load([str(source)], local_batch=2)
    loader.read_step(2)
    loader._ahead[1].result()
    for shard in (source / "train").glob("*.ds"):
        shard.unlink()
        shard.with_name(f"{shard.name}.index").unlink()
    loader.sources[0].shards.files.close()  # as after many other files
    loader.read_step(2)  # was read ahead; reading further fails in the thread
    state = loader.state_dict()
    with pytest.raises(
        UserError, match=r"was removed or truncated while it was in use .*: restore"
    ):
        loader.read_step(2)
    assert loader.state_dict() == state
    loader.close()


def test_the_end_of_the_data_is_an_error_only_when_it_is_reached(source):
    loader = load([str(source)], local_batch=2, max_epochs=1)
    windows = loader.sources[0].windows_per_epoch // 2 * 2
    assert loader.order.end == loader.sources[0].windows_per_epoch
    loader.require_windows(windows)
    with pytest.raises(UserError, match=rf"total_tokens needs {windows + 2} windows of {L}, the"):
        loader.require_windows(windows + 2)
    loader.read_step(windows)
    with pytest.raises(UserError, match=rf"the data ends at window {loader.order.end}: .*/a may"):
        loader.read_step(2)
    assert loader.windows_consumed == windows
    loader.close()
