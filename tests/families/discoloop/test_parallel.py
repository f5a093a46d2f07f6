"""The decoded channel on several ranks and compiled: numbers, bytes, and states that travel."""

from functools import partial

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torchtitan.models.common.embedding import Embedding

from tests.distributed.test_compile import (
    COMPILED_TOLERANCE,
    SEQ_LEN,
    compare_gradients,
    model_of,
    parallelized,
)
from tests.distributed.test_parity import HELD, Case, check_parity, runnable
from tests.distributed.test_vocabulary_parallel import (
    EXACT,
    WIDTH,
    build_head,
    draw_inputs,
    share_over,
)
from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions
from titan_loop.families.discoloop.soft_decode import Decoding, soft_decode

# Micro-batches with two channels between steps, and with none. One layer, but
# two in a case of each family.
STEPS = (3, 1)
ONE_LAYER = (("n_layers", 1),)
LEARNED = (*ONE_LAYER, ("channel_gate", "learned"))
disco = partial(Case, steps=STEPS, family=DiscoLoopOptions, tie_weights=True, options=ONE_LAYER)
ponder = partial(Case, steps=STEPS, family=PonderOptions)
CASES = {
    "disco": disco(exit_gate=False, options=()),
    "disco-learned-full": disco(
        options=(*LEARNED, ("top_k", 5), ("temperature", 0.5)), checkpointing="full"
    ),
    "disco-held-by-step": disco(
        exit_gate=False, options=LEARNED, checkpointing="recurrent-step+full", fsdp=HELD
    ),
    "disco-selective": disco(options=(*LEARNED, ("top_k", 5)), checkpointing="selective"),
    "disco-held-offloaded": disco(checkpointing="full-offload", fsdp=HELD),
    "disco-always-truncated": disco(reshard="always", backward_steps=2),
    "ponder-always": ponder(
        options=(*ONE_LAYER, ("top_k", 9), ("normalised_over", "vocabulary")),
        reshard="always",
        checkpointing="selective",
    ),
    "ponder-never": ponder(
        reshard="never",
        options=(*ONE_LAYER, ("scale_embeddings", True), ("start_factor", 3.0)),
    ),
    "ponder-held": ponder(tie_weights=True, fsdp=HELD),
}
PAIRS = [
    *(("dp2", case) for case in CASES),
    *(("tp2", case) for case in ("disco", "disco-learned-full", "ponder-always")),
    *(("tp2-no-sp", case) for case in ("disco-learned-full", "ponder-never")),
    *(("dp2-tp2", case) for case in ("disco-selective", "disco-held-by-step")),
    *(("hsdp2x2", case) for case in ("disco-always-truncated", "ponder-held")),
    ("cp2", "disco-learned-full"),
    ("hsdp2x2-cp2", "disco"),
    ("dp2-cp2-tp2", "ponder-always"),
]


@pytest.mark.parametrize(("layout", "case"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, CASES[case])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.parametrize("top_k", [None, 8])
def test_what_is_decoded_between_compiled_layers_is_the_same(top_k):
    options = DiscoLoopOptions(size="debugmodel", n_layers=1, channel_gate="learned", top_k=top_k)
    # The point is what stands between graphs, not inductor's code within them.
    compiled = parallelized(model_of(options), enable=True, backend="aot_eager")
    eager = model_of(options)
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    want, got = (
        model(tokens, positions, recurrent_steps=3).hidden_RBLD[-1] for model in (eager, compiled)
    )
    torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
    compare_gradients(compiled, got, eager, want)
    assert eager.channel.weight.grad.abs().max() > 0


def check_sliced_decoding() -> None:
    """Φ of a sliced head equals Φ of the whole head on every rank, also where logits tie."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for vocab, decoding in (
        (12, Decoding(temperature=0.5)),
        (11, Decoding(top_k=5)),
        (11, Decoding(top_k=8, normalised_over="vocabulary")),
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
