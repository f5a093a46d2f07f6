"""Nothing in a checkpoint runs when it is read, and what is wrong with one is said in one line."""

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.checkpoint.small_checkpoint import Payload, assert_one_line, rewrite, state, write, zeros
from titan_loop.checkpoint.loading import load_checkpoint
from titan_loop.checkpoint.manifest import DamagedCheckpointError
from titan_loop.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "step-1")


def test_a_payload_in_dcps_own_table_is_never_read(checkpoint, tmp_path):
    marker, path = tmp_path / "ran", checkpoint / ".metadata"
    path.write_bytes(pickle.dumps(Payload(marker)))
    loaded = zeros()
    load_checkpoint(loaded, checkpoint, group=None)
    assert torch.equal(loaded["weight"], state()["weight"])
    assert not marker.exists()


def test_a_payload_in_a_byte_entry_does_not_run(tmp_path):
    marker, checkpoint = tmp_path / "ran", tmp_path / "step-1"
    write(checkpoint, {**state(), "text": Payload(marker)})
    with pytest.raises(UserError) as caught:
        load_checkpoint(zeros(), checkpoint, group=None)
    assert not marker.exists()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert_one_line(caught.value, "entry 'text'", str(checkpoint), "do not use")
    load(zeros(), checkpoint_id=checkpoint, no_dist=True)
    assert marker.exists(), "stock DCP should have run it, or this test shows nothing"


def test_a_payload_in_a_tensor_does_not_run(checkpoint, tmp_path):
    marker, shard = tmp_path / "ran", checkpoint / "__0_0.distcp"
    content = io.BytesIO()
    torch.save(Payload(marker), content)

    place = [shard.stat().st_size, len(content.getvalue())]
    rewrite(
        checkpoint, lambda entries: entries["weight"]["chunks"][0].__setitem__(slice(3, 5), place)
    )
    with shard.open("ab") as file:
        file.write(content.getvalue())
    with pytest.raises(UserError) as caught:
        load_checkpoint(zeros(), checkpoint, group=None)
    assert not marker.exists()
    assert_one_line(caught.value, str(shard), "do not use")
