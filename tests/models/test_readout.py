"""The streamed head against materialised logits: values, gradients, memory, sliced vocabulary."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.models.readout import LMHead

EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""float64 against float64: only the order of sums differs."""
SINGLE = {"rtol": 2e-5, "atol": 2e-6}
"""fp32 against float64: 2^-24 through sums over D, V and R of this size."""
BF16 = {"rtol": 3e-2, "atol": 3e-2}
"""bf16 matmuls (2^-9 per rounding) against float64."""


def build_head(
    width: int, vocab: int, *, chunk_tokens: int = 5, dtype: torch.dtype = torch.float64
) -> LMHead:
    head = LMHead.Config(in_features=width, out_features=vocab, chunk_tokens=chunk_tokens).build()
    return head.to(dtype)


def draw_inputs(
    *,
    steps: int = 3,
    batch: int = 2,
    length: int = 8,
    width: int = 6,
    vocab: int = 11,
    dtype: torch.dtype = torch.float64,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Hidden states, labels with some ignored, and weights, of which one is 0."""
    generator = torch.Generator().manual_seed(0)
    hidden = tuple(
        torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for _ in range(steps)
    )
    labels = torch.randint(vocab, (batch, length), generator=generator)
    labels[0, 0] = IGNORE_INDEX
    labels[-1, -2:] = IGNORE_INDEX
    weight = torch.rand(steps, batch, length, generator=generator, dtype=torch.float64)
    weight[0, 0, 1] = 0.0
    return (hidden, labels, weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_())


def materialised(
    hidden: Sequence[Tensor],
    head_weight: Tensor,
    labels: Tensor,
    weight: Tensor,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The definition: all logits at once, in float64; no gradient of the z-loss to the weights."""
    logits = torch.stack([h.double() for h in hidden]) @ head_weight.double().T
    flat_labels = labels.expand(len(hidden), *labels.shape).flatten()
    ce = F.cross_entropy(
        logits.flatten(0, -2), flat_labels, reduction="none", ignore_index=IGNORE_INDEX
    ).view(len(hidden), *labels.shape)
    z = logits.logsumexp(dim=-1).where(labels != IGNORE_INDEX, 0.0)
    penalty = z_loss * (weight.detach().double() * z.square()).sum()
    return (weight.double() * ce).sum() + penalty, ce


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_and_every_gradient_equal_materialised_logits(dtype, tolerance, chunk_tokens, z_loss):
    head = build_head(6, 11, chunk_tokens=chunk_tokens, dtype=dtype)
    hidden, labels, weight = draw_inputs(dtype=dtype)
    loss, ce = head(hidden, labels_BL=labels, weight_RBL=weight, z_loss=z_loss)
    want_loss, want_ce = materialised(hidden, head.weight, labels, weight, z_loss)
    assert loss.dtype == ce.dtype == dtype
    torch.testing.assert_close(loss.double(), want_loss, **tolerance)
    torch.testing.assert_close(ce.double(), want_ce, **tolerance)
    inputs = (*hidden, head.weight, weight)
    # A factor on the loss: backward must scale what forward computed.
    got, want = (gradients(3.0 * each, *inputs) for each in (loss, want_loss))
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("labelled", [0, 1, 7, 16])
@pytest.mark.parametrize("grad", [True, False])
def test_tokens_without_a_label_cost_no_products(labelled: int, grad: bool):
    """The same loss, cross entropies and gradients from the rows with a label alone."""
    head = build_head(6, 11, chunk_tokens=5)
    hidden, _, weight = draw_inputs()
    labels = torch.full((2, 8), IGNORE_INDEX)
    rows = torch.randperm(16, generator=torch.Generator().manual_seed(1))[:labelled].sort().values
    labels.view(-1)[rows] = torch.arange(labelled) % 11
    with torch.set_grad_enabled(grad):
        want_loss, want_ce = head(hidden, labels_BL=labels, weight_RBL=weight, z_loss=0.3)
        with FlopCounterMode(display=False) as counter:
            loss, ce = head(hidden, labels_BL=labels, weight_RBL=weight, z_loss=0.3, rows_T=rows)
    products = 2 if grad else 1  # logits, gradient of the states; the counter knows no `addmm_`
    assert counter.get_total_flops() == products * 2 * len(hidden) * labelled * 6 * 11
    torch.testing.assert_close((loss, ce), (want_loss, want_ce), **EXACT)
    if grad:
        inputs = (*hidden, head.weight, weight)
        got, want = (gradients(each, *inputs) for each in (loss, want_loss))
        torch.testing.assert_close(got, want, **EXACT)


def test_a_weight_at_an_ignored_label_may_be_infinite():
    head = build_head(6, 11)
    hidden, labels, weight = draw_inputs()
    broken = torch.where(labels == IGNORE_INDEX, torch.inf, weight.detach())
    want, got = (head(hidden, labels_BL=labels, weight_RBL=each)[0] for each in (weight, broken))
    assert torch.equal(got, want)


@pytest.mark.parametrize("frozen", ["head", "hidden", "both"])
def test_frozen_inputs_get_no_gradient(frozen: str):
    head = build_head(6, 11)
    hidden, labels, weight = draw_inputs()
    if frozen in ("head", "both"):
        head.requires_grad_(False)
    if frozen in ("hidden", "both"):
        hidden = tuple(h.detach() for h in hidden)
    loss, ce = head(hidden, labels_BL=labels, weight_RBL=weight)
    loss.backward()
    assert (head.weight.grad is None) == (frozen != "hidden")
    assert all((h.grad is None) == (frozen != "head") for h in hidden)
    assert weight.grad is not None
    assert torch.equal(weight.grad, ce)


def test_without_grad_mode_only_the_loss_is_computed():
    head = build_head(6, 11)
    hidden, labels, weight = draw_inputs()
    want_loss, want_ce = head(hidden, labels_BL=labels, weight_RBL=weight)
    with torch.no_grad(), LiveMemory() as memory:
        loss, ce = head(hidden, labels_BL=labels, weight_RBL=weight)
    assert torch.equal(loss, want_loss)
    assert torch.equal(ce, want_ce)
    assert not loss.requires_grad
    assert head.weight.shape not in memory.shapes, "a gradient of the head weight was allocated"


def test_bf16_accumulates_the_loss_in_fp32():
    head = build_head(64, 97, chunk_tokens=16, dtype=torch.bfloat16)
    hidden, labels, weight = draw_inputs(length=32, width=64, vocab=97, dtype=torch.bfloat16)
    loss, ce = head(hidden, labels_BL=labels, weight_RBL=weight)
    assert loss.dtype == ce.dtype == torch.float32
    want_loss, want_ce = materialised(hidden, head.weight, labels, weight)
    torch.testing.assert_close(ce.double(), want_ce, **BF16)
    # Were the sum itself in bf16, 192 terms would be off by percents.
    torch.testing.assert_close(loss.double(), want_loss, rtol=2e-3, atol=0.0)
    inputs = (*hidden, head.weight)
    for got, want in zip(gradients(loss, *inputs), gradients(want_loss, *inputs), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() < 0.02 * want.norm()


class LiveMemory(TorchDispatchMode):
    """Records the storages that operations allocate: the largest one, and the peak of all alive."""

    def __init__(self):
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self.largest_bytes = self.live_bytes = self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._allocated(storage)
                    self.shapes.add(tensor.shape)
        return result

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self.live_bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.largest_bytes = max(self.largest_bytes, size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def test_memory_grows_with_the_hidden_states_only():
    steps, width, vocab, chunk_tokens, length = 4, 16, 4096, 32, 128
    head = build_head(width, vocab, chunk_tokens=chunk_tokens, dtype=torch.float32)
    itemsize = 4
    memory = {}
    for tokens in (length, 4 * length):
        hidden, labels, weight = draw_inputs(
            steps=steps, batch=1, length=tokens, width=width, vocab=vocab, dtype=torch.float32
        )
        head.zero_grad()
        with LiveMemory() as memory[tokens]:
            loss, _ = head(hidden, labels_BL=labels, weight_RBL=weight)
            loss.backward()
    short, long = memory[length], memory[4 * length]

    # The largest tensor is one chunk of logits, whatever L is: never L × V.
    assert short.largest_bytes == long.largest_bytes == chunk_tokens * vocab * itemsize
    # What grows: the saved gradients of R states and one scaled copy of each in backward, and a
    # handful of per-token scalars (labels, weights, CE).
    grown_tokens = 3 * length
    hidden_gradients = 2 * steps * grown_tokens * width * itemsize
    token_scalars = 8 * steps * grown_tokens * itemsize
    assert 0 < long.peak_bytes - short.peak_bytes <= hidden_gradients + token_scalars


def test_large_logits_stay_finite():
    head = build_head(6, 11, dtype=torch.float32)
    hidden, labels, weight = draw_inputs(dtype=torch.float32)
    large = tuple((1e4 * h).detach().requires_grad_() for h in hidden)
    loss, _ = head(large, labels_BL=labels, weight_RBL=weight)
    want_loss, _ = materialised(large, head.weight, labels, weight)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-4, atol=1e-2)
    assert all(g.isfinite().all() for g in gradients(loss, *large, head.weight, weight))
