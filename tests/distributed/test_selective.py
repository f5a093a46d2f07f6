"""`activation_checkpoint.save`: the chosen operations, and no others, run once."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import activation_checkpoint as upstream
from torchtitan.models.common.linear import Linear

from tests.distributed.test_compile import COMPILED_TOLERANCE, DYNAMO_WARNS, parallelized
from titan_loop.distributed.activation_checkpointing import (
    ActivationCheckpointing,
    SelectiveAC,
    check_recomputation,
)
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, decoder_config

SEQ_LEN, LAYERS, STEPS = 16, 2, 2
PRODUCTS = 7  # of a visit: q, k, v, o, w1, w2, w3
W1 = "feed_forward.w1"  # of w3's shape

Counts = tuple[int, int]
"""Matrix products and attentions of a visit that the backward pass runs again."""

CASES: dict[str, tuple[ActivationCheckpointing.Config | None, Counts]] = {
    "torchtitan": (upstream.SelectiveAC.Config(), (3, 1)),
    "as torchtitan": (SelectiveAC.Config(), (3, 1)),
    "nothing": (SelectiveAC.Config(save=[]), (PRODUCTS, 1)),
    "attention": (SelectiveAC.Config(save=["attention"]), (PRODUCTS, 0)),
    "half": (SelectiveAC.Config(save=["every-second-mm", "attention"]), (3, 0)),
    "products": (SelectiveAC.Config(save=["mm"]), (0, 1)),
    "both": (SelectiveAC.Config(save=["mm", "attention"]), (0, 0)),
    "all but w1 and w3": (
        SelectiveAC.Config(save=["mm"], force_recompute_mm_shapes_by_fqns=[W1]),
        (2, 1),
    ),
}


class Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Compiled code calls attention through `run_with_rng_state(state, attention, …)`.
        called = args[1] if isinstance(func, HigherOrderOperator) else func
        self.calls[called._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counts:
        return self.calls["mm"], self.calls["_scaled_dot_product_flash_attention_for_cpu"]


def model_of() -> LoopDecoder:
    torch.manual_seed(0)
    return build_decoder(OuroOptions(size="debugmodel", n_layers=LAYERS), max_seq_len=SEQ_LEN)


def counted_backward(model: LoopDecoder) -> tuple[Counts, dict[str, Tensor]]:
    """Return the operations of a second step's backward pass, and its gradients."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (2, SEQ_LEN), generator=generator)
    direction = torch.randn(2, SEQ_LEN, 64, generator=generator)
    positions = torch.arange(SEQ_LEN).expand(2, -1).contiguous()
    for _ in range(2):
        model.zero_grad()
        state = model(tokens, positions, recurrent_steps=STEPS).hidden_RBLD[-1]
        with Operations() as operations:
            (state * direction).mean().backward()
    return operations.counts, {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_saved_runs_again_on_every_visit(case):
    policy, again = CASES[case]
    (products, attentions), expected = counted_backward(model_of())
    counts, gradients = counted_backward(parallelized(model_of(), False, policy=policy))
    visits = LAYERS * STEPS
    assert counts == (products + visits * again[0], attentions + visits * again[1])
    assert len(gradients) == len(expected) > 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


@DYNAMO_WARNS
@pytest.mark.parametrize("case", ["half", "all but w1 and w3"])
def test_compiled_layers_run_the_same_operations_again(case):
    policy, again = CASES[case]
    torch._dynamo.reset()
    compiled = parallelized(model_of(), True, backend="aot_eager_decomp_partition", policy=policy)
    (products, attentions), expected = counted_backward(model_of())
    counts, gradients = counted_backward(compiled)
    visits = LAYERS * STEPS
    assert counts == (products + visits * again[0], attentions + visits * again[1])
    for name, gradient in gradients.items():
        atol = COMPILED_TOLERANCE * float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SelectiveAC.Config(save=["mm", "matmul"]),
            "activation_checkpoint.save=['mm', 'matmul']: matmul is not an operation; known: "
            "attention, communication, every-second-mm, experts, mm",
        ),
        (
            SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["feed_forward.w4"]),
            "activation_checkpoint.force_recompute_mm_shapes_by_fqns: feed_forward.w4 does not "
            "name linear layers; nearest: feed_forward.w3, feed_forward.w2, feed_forward.w1",
        ),
        (
            SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["feed_forward"]),
            "activation_checkpoint.force_recompute_mm_shapes_by_fqns: feed_forward does not "
            "name linear layers; nearest: feed_forward.w3, feed_forward.w2, feed_forward.w1",
        ),
    ],
)
def test_an_unknown_operation_or_layer_is_refused_in_one_line(config, message):
    model = decoder_config(OuroOptions(size="debugmodel"), max_seq_len=SEQ_LEN)
    linears = {name: False for name, *_ in model.traverse(Linear.Config)}
    with pytest.raises(UserError) as refused:
        check_recomputation(config, ParallelismConfig(), linears=linears)
    known = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["qkv_linear.wv", "w1"])
    check_recomputation(known, ParallelismConfig(), linears=linears)
    assert str(refused.value) == message


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_whose_products_are_always_kept_is_not_forced_to_recompute_them(biased):
    """A bias makes the product another operation, which torchtitan's choice does not count."""
    config = SelectiveAC.Config(save=["mm"], force_recompute_mm_shapes_by_fqns=["gate", "up"])
    linears = {"layers.0.moe.router.gate": False, "layers.0.feed_forward.up": biased}
    with pytest.raises(UserError) if biased else nullcontext() as refused:
        check_recomputation(config, ParallelismConfig(), linears=linears)
    field = "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    message = f"{field}: up has no effect: products with a bias, and in float8, are always kept"
    assert refused is None or str(refused.value) == message


def test_products_with_a_bias_are_kept_by_every_choice_of_products():
    """As the option's help says, and as the refusal relies on."""
    for save, kept in (["mm"], True), (["every-second-mm"], True), ([], False):
        ac = SelectiveAC.Config(save=save).build(dump_folder="")
        layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        wrapped = ac._wrap_block(layer)
        loss = wrapped(torch.zeros(2, 3, 8, requires_grad=True)).sum()
        with Operations() as operations:
            loss.backward()
        assert (operations.calls["addmm"] == 0) == kept
