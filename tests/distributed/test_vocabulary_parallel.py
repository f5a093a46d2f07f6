"""The streamed head with its vocabulary sliced over two ranks against the whole one, in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.distributed.vocabulary_parallel import SlicedVocabulary, share_vocabulary
from titan_loop.errors import UserError
from titan_loop.models.readout import LMHead

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64: only the order of sums differs
STEPS, WIDTH = 3, 6


def build_head(vocab: int) -> LMHead:
    return LMHead.Config(in_features=WIDTH, out_features=vocab, chunk_tokens=5).build().double()


def draw_inputs(vocab: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Hidden states, labels with some ignored, and weights."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(STEPS, 2, 8, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (2, 8), generator=generator)
    labels[0, 0] = labels[-1, -1] = IGNORE_INDEX
    weight = torch.rand(STEPS, 2, 8, generator=generator, dtype=torch.float64)
    return tuple(h.requires_grad_() for h in hidden.unbind()), labels, weight.requires_grad_()


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def check_sliced_vocabulary() -> None:
    """On every rank of a gloo group: the sliced head equals the whole one."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for vocab in (12, 11, 2 * world - 1):
        torch.manual_seed(0)  # the same whole head on every rank
        head = build_head(vocab)
        hidden, labels, weight = draw_inputs(vocab)
        whole = head(hidden, labels_BL=labels, weight_RBL=weight, z_loss=0.2)
        want = gradients(whole[0], *hidden, head.weight, weight)
        _check_dtensor_head(head, hidden, labels, weight, whole, want, mesh)


def _check_dtensor_head(
    head: LMHead,
    hidden: tuple[Tensor, ...],
    labels: Tensor,
    weight: Tensor,
    whole: tuple[Tensor, Tensor],
    want: tuple[Tensor, ...],
    mesh: Any,
) -> None:
    sliced = build_head(head.out_features)
    sliced.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    states = [distribute_tensor(h.detach(), mesh, [Replicate()]).requires_grad_() for h in hidden]
    share_over(sliced, mesh)
    # As in the model, something upstream reads the state: the partial gradient is reduced there.
    loss, ce = sliced(tuple(states), labels_BL=labels, weight_RBL=weight, z_loss=0.2)
    _check_equal_on_all_ranks(loss, ce, whole)
    *got_hidden, got_head, got_weight = gradients(loss, *states, sliced.weight, weight)
    for got, expected in zip((*got_hidden, got_head), want[:-1], strict=True):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), expected, **EXACT)
    torch.testing.assert_close(got_weight, want[-1], **EXACT)


def _check_equal_on_all_ranks(loss: Tensor, ce: Tensor, whole: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(loss, whole[0], **EXACT)
    torch.testing.assert_close(ce, whole[1], **EXACT)
    for value in (loss.detach(), ce):
        largest = value.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(largest, value), "ranks disagree"


def share_over(head: LMHead, mesh: Any) -> None:
    dims: Any = SimpleNamespace(tp_enabled=True, get_mesh={"tp": mesh}.__getitem__)
    share_vocabulary(head, dims)


def check_a_rank_without_rows() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size=1: 2 tensor-parallel ranks leave one"):
        SlicedVocabulary(1, dist.group.WORLD)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("check", [check_sliced_vocabulary, check_a_rank_without_rows])
def test_on_two_ranks(gloo_pool, check):
    gloo_pool(2).run(check)
