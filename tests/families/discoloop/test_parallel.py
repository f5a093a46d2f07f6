"""The decoded channel on several ranks and compiled: numbers, bytes, and states that travel."""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torchtitan.models.common.embedding import Embedding

from tests.distributed.test_vocabulary_parallel import (
    EXACT,
    WIDTH,
    build_head,
    draw_inputs,
    share_over,
)
from titan_loop.families.discoloop.soft_decode import Decoding, soft_decode


def check_sliced_decoding() -> None:
    """Φ of a sliced head equals Φ of the whole head on every rank, also where logits tie."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for vocab, decoding in (
        (12, Decoding(temperature=0.5)),
        (11, Decoding(top_k=5)),
        (11, Decoding(top_k=8)),
        (11, Decoding(top_k=11)),
    ):
        torch.manual_seed(0)
        head = build_head(vocab)
        with torch.no_grad():
            head.weight.copy_(_exact(head.weight[torch.arange(vocab) % 4]))  # many are equal
        encoder = Embedding.Config(num_embeddings=vocab, embedding_dim=WIDTH).build().double()
        (hidden, *_), _, _ = draw_inputs(vocab)
        hidden = _exact(hidden.detach()).requires_grad_()
        want = soft_decode(head, hidden, encoder, decoding)
        grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2)).double()
        wanted = torch.autograd.grad(want, [hidden, head.weight, encoder.weight], grad)

        sliced = build_head(vocab)
        parts = [
            torch.nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(0)]))
            for table in (head, encoder)
        ]
        sliced.weight, encoder.weight = parts
        share_over(sliced, mesh)
        state = distribute_tensor(hidden.detach(), mesh, [Replicate()]).requires_grad_()
        decoded = soft_decode(sliced, state, encoder, decoding)
        assert decoded.placements == (Partial(),)
        scattered = decoded.redistribute(placements=[Shard(1)])
        torch.testing.assert_close(scattered.full_tensor(), want, **EXACT)
        grads = torch.autograd.grad(
            scattered, [state, *parts], distribute_tensor(grad, mesh, [Shard(1)])
        )
        for got, expected in zip(grads, wanted, strict=True):
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.full_tensor(), expected, **EXACT)


def _exact(values: Tensor) -> Tensor:
    """Return multiples of 1/64: their products add up exactly, whatever the order."""
    return (64 * values).round() / 64


def test_a_sliced_vocabulary_decodes_as_a_whole_one(gloo_pool):
    gloo_pool(2).run(check_sliced_decoding)
