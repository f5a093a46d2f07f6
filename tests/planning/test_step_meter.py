"""The meter counts live storages, and the bytes that collectives bring to this rank."""

from collections.abc import Iterator

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_loop.planning.step_meter import Moved, StepMeter

RANKS, RANK = 4, 1


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """Four ranks of which only this one is there."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_storages_count_while_they_live_at_their_present_size():
    fake_mode = FakeTensorMode()
    resize = torch.UntypedStorage.resize_
    meter = StepMeter(fake_mode)
    with fake_mode, meter:
        kept = torch.empty(256)
        assert meter.live_bytes == meter.peak_bytes == 1024
        view = kept[1:].view(-1)
        assert meter.live_bytes == 1024
        torch.empty(512) + torch.empty(512)
        assert (meter.live_bytes, meter.peak_bytes) == (1024, 1024 + 3 * 2048)
        meter.reset()
        assert meter.peak_bytes == 1024
        kept.untyped_storage().resize_(4096)
        assert (meter.live_bytes, meter.peak_bytes) == (4096, 4096)
        kept.untyped_storage().resize_(0)
        with meter.paused():
            with meter.paused():
                unseen = torch.empty(4096)
            also_unseen = torch.empty(4096)
            unseen.untyped_storage().resize_(8)
        seen = torch.empty(2)
        assert (meter.live_bytes, meter.peak_bytes) == (8, 4096)
        del kept, view, seen, unseen, also_unseen
        with FakeTensorMode():
            torch.empty(99)
    assert meter.live_bytes == 0
    assert torch.UntypedStorage.resize_ is resize


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # newer names in newer torch
def test_collectives_count_the_bytes_that_are_received(world: dist.ProcessGroup):
    """A part has 10 numbers of 4 bytes, the whole 40."""
    fake_mode = FakeTensorMode()
    with fake_mode, StepMeter(fake_mode) as meter:
        part, whole = torch.empty(10), torch.empty(40)
        dist.all_gather_into_tensor(whole, part)
        functional.all_gather_tensor(part, 0, world)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(whole, torch.empty(40), [4, 6, 10, 20], [10] * RANKS)
        functional.all_to_all_single(whole, [4, 6, 10, 20], [10] * RANKS, world)
        dist.all_reduce(whole)  # a scalar's, outside the backward pass
        counted = {kind: (moved.count, moved.received_bytes) for kind, moved in meter.moved.items()}
        assert counted == {
            "all-gather": (2, 2 * 3 * 40.0),
            "reduce-scatter": (1, 3 * 40.0),
            "all-to-all": (2, 2 * (160 - 6 * 4.0)),
        }
        meter.reset()
        with meter.paused():
            dist.all_gather_into_tensor(whole, part)
        assert meter.moved == {}
        weight = torch.empty(40, requires_grad=True)
        weight.register_hook(lambda gradient: dist.all_reduce(gradient) and None)
        weight.sum().backward()
        assert meter.moved["all-reduce"] == Moved(1, 2 * 160 * (1 - 1 / RANKS))
