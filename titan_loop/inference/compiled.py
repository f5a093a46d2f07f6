"""Visits of the stack as compiled code for a CPU: one function in place of thousands of operations.

    visit ─► graph of its operations ─► parameters and caches become inputs ─► inductor ─► C++

For one token a library's matrix product costs more than its arithmetic. So products of one row and
attention of one query become loops, which inductor fuses with their surroundings. Graphs that
differ only in the tensors they read, as two recurrent steps do, share their code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

Code = Callable[[list[Tensor]], Sequence[Tensor]]
"""Maps a list of tensors, which it empties, to its outputs."""

OPTIONS = {
    "realize_reads_threshold": 2,  # or a norm is computed again for every element of a product
    "size_asserts": False,
}


def compile_visit(
    visit: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], known: dict[Any, Code]
) -> Callable[..., Sequence[Tensor]]:
    """Compile a function of contiguous tensors that may read and write others; nothing is computed.

    Args:
        known: Code of earlier graphs, to which this one's is added.

    Raises:
        RuntimeError: The host reads a tensor, or the compiler failed.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def fresh(*inputs: Tensor) -> list[Tensor]:
        return [output.clone() for output in visit(*inputs)]  # none is a view of an input

    # Inductor keeps code for later starts only where there is a `ShapeEnv`.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    aten = torch.ops.aten
    loops = {
        aten.addmm.default: _sum,
        aten.mm.default: _product,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    }
    fakes = [mode.from_tensor(each) for each in inputs]
    traced = make_fx(fresh, loops, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    graph, outside = _with_inputs(traced)
    tensors = [*outside, *inputs]
    key = graph.code, *((each.dtype, each.shape, each.stride()) for each in tensors)
    if key not in known:
        known[key] = _code(graph, tensors, mode)
    code = known[key]
    return lambda *inputs: code([*outside, *inputs])


def _code(graph: fx.GraphModule, tensors: Sequence[Tensor], mode: FakeTensorMode) -> Code:
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # takes seconds

    found: list[Any] = []

    def compile_inner(*arguments: Any, **options: Any) -> Any:
        found.append(compile_fx_inner(*arguments, **options))
        return found[0]

    # Views of a cache do not overlap. If the compiler knew of their common memory, it would make
    # one input of them all, and fix the places that they have in it.
    apart = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in tensors]
    # The other cache, of what `compile_fx` returns, would not call `compile_inner`.
    with tracing(TracingContext(mode)), functorch.patch(enable_autograd_cache=False):
        compile_fx(graph, apart, inner_compile=compile_inner, config_patches=OPTIONS)
    # What `compile_fx` returns also handles gradients and views, which costs as much as a layer.
    return found[0].current_callable


def _with_inputs(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Turn the tensors that a graph holds into its first inputs; return the new graph and them."""
    first = next(iter(graph.graph.nodes))
    inputs: dict[str, fx.Node] = {}
    for node in [*graph.graph.nodes]:
        if node.op == "get_attr":
            if node.target not in inputs:
                with graph.graph.inserting_before(first):
                    inputs[node.target] = graph.graph.placeholder(node.target)
            node.replace_all_uses_with(inputs[node.target])
            graph.graph.erase_node(node)
    tensors = [getattr(graph, name).detach() for name in inputs]
    return fx.GraphModule({}, graph.graph), tensors


def _product(x_TD: Tensor, weight_DE: Tensor) -> Tensor:
    if x_TD.shape[0] > 1:
        return NotImplemented
    return (x_TD * weight_DE.t()).sum(1).unsqueeze(0)


def _sum(bias_E: Tensor, x_TD: Tensor, weight_DE: Tensor) -> Tensor:
    product_TE = _product(x_TD, weight_DE)
    return product_TE if product_TE is NotImplemented else product_TE + bias_E


def _attention(
    q_BNLH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    batch, _, queries, head_dim = q_BNLH.shape
    if queries > 1 or q_BNLH.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    factor = head_dim**-0.5 if scale is None else scale
    q_BKG1H = (q_BNLH * factor).reshape(batch, k_BKSH.shape[1], -1, 1, head_dim)
    scores_BKGS = (q_BKG1H * k_BKSH.unsqueeze(2)).sum(-1)
    if attn_mask is not None:  # (B, 1, 1, S)
        scores_BKGS = scores_BKGS + attn_mask
    weights_BKGS1 = scores_BKGS.softmax(-1).unsqueeze(-1)
    out_BKGH = (weights_BKGS1 * v_BKSH.unsqueeze(2)).sum(3)
    return out_BKGH.view(q_BNLH.shape), scores_BKGS.new_empty(q_BNLH.shape[:3])
