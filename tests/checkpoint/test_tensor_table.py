"""The table of entries: what DCP described, checked, and written for checkpoints without one."""

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata as dcp

from tests.checkpoint.small_checkpoint import assert_one_line, rewrite, write
from titan_loop.checkpoint.manifest import TABLE, DamagedCheckpointError
from titan_loop.checkpoint.tensor_table import read_table
from titan_loop.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "step-1")


def assert_equals_dcps(checkpoint: Path) -> None:
    stock, ours = pickle.loads((checkpoint / ".metadata").read_bytes()), read_table(checkpoint)
    assert ours.storage_data == stock.storage_data
    for key, entry in stock.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            # Whatever else DCP notes, such as pinned memory, it calls deprecated.
            entry = replace(entry, properties=dcp.TensorProperties(dtype=entry.properties.dtype))
        assert ours.state_dict_metadata[key] == entry
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()


def test_the_table_says_what_dcps_own_metadata_says(checkpoint):
    assert_equals_dcps(checkpoint)


def resize(entries: dict[str, Any], rows: Any, stored: int | None = None) -> None:
    weight = entries["weight"]
    weight["shape"] = weight["chunks"][0][1] = [rows, 4]
    if stored is not None:
        weight["chunks"][0][4] = stored


@pytest.mark.parametrize(
    "change",
    [
        partial(resize, rows=10**13),
        partial(resize, rows=10**13, stored=10**15),
        partial(resize, rows=10**30),
        partial(resize, rows=-1),
        lambda entries: entries["weight"].update(shape=[7, 4]),
        partial(resize, rows="a"),
        partial(resize, rows=6, stored=-1),
        lambda entries: entries["weight"].update(shape=[1] * 70),
        lambda entries: entries["weight"].update(dtype="nn"),
        lambda entries: entries["weight"].update(dtype="float33"),
        lambda entries: entries["weight"].update(chunks=[]),
        lambda entries: entries["weight"].update(chunks=[None]),
        lambda entries: entries["weight"]["chunks"].extend(entries["weight"]["chunks"]),
        lambda entries: entries["text"].update(place=["__0_0.distcp", 0]),
        lambda entries: entries["text"].update(place=["manifest.json", 0, 1]),
        lambda entries: entries.update({"a\x1b[31m": entries["text"]}),
        lambda entries: entries.update(text=5),
    ],
)
def test_a_table_that_cannot_be_true_is_damage(checkpoint, change):
    rewrite(checkpoint, change)
    with pytest.raises(DamagedCheckpointError) as caught:
        read_table(checkpoint)
    assert_one_line(caught.value, str(checkpoint / TABLE))


@pytest.mark.parametrize("where", ["../other/__0_0.distcp", "/etc/passwd", ".."])
def test_files_outside_the_checkpoint_are_refused(checkpoint, where):
    rewrite(checkpoint, lambda entries: entries["text"]["place"].__setitem__(0, where))
    with pytest.raises(UserError, match="may lie outside its folder") as caught:
        read_table(checkpoint)
    assert_one_line(caught.value)
