"""Visits of the stack in training as CUDA graphs: one launch forward, one backward.

    forward of visit n    input, context ─► copied into tensors that stay ─► replay ─► state, copied
    backward of visit n   gradient ─► copied ─► replay ─► gradient of the input, copied;
                                                          weights' gradients, added to `grad`

n counts the visits of a pass, so that a deeper pass captures the visits that are new alone, and a
shallower one leaves the last ones out. torch's own trees of CUDA graphs (`triton.cudagraphs`) know
a graph by all that ran before it: every R would have backward graphs of its own. Its
`make_graphed_callables` would keep the weights' gradients of every visit, and let autograd add them
up outside of the graphs.

Each forward graph has its own memory pool, because what it saves must survive later visits; the
backward graphs share one. Passes without gradients are not captured.

On a CPU the same visits run without a graph, for tests. Not yet run on a GPU.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from titan_loop.errors import UserError
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import Visit
from titan_loop.models.joined import Joined


def can_capture() -> bool:
    """Return whether there are CUDA graphs."""
    return torch.cuda.is_available()


class _Kind:
    """What all visits of the same layers and shapes share: weights, context, memory."""

    def __init__(
        self,
        visit: Visit,
        layers: Sequence[nn.Module],
        joined: Sequence[Joined | None],
        context: LoopContext,
    ) -> None:
        self._visit, self._layers, self._joined = visit, layers, joined
        own: list[Any] = [*zip(layers, joined, strict=True)]
        replaced = [part for layer, both in own if both for part in chain(*layer.joinable)]
        unused = {weight for part in replaced for weight in part.parameters()}
        used = [weight for layer in layers for weight in layer.parameters() if weight not in unused]
        used += tree_leaves(joined)  # None is no leaf
        self.weights = [weight for weight in used if weight is not None and weight.requires_grad]
        # Graphs add to these tensors, which are the weights' `grad` in every step.
        self.sums = [torch.zeros_like(w, dtype=w.grad_dtype or w.dtype) for w in self.weights]
        leaves, self._structure = tree_flatten(context)
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._seen = 0
        # Autograd records a visit for it. A weight would do, but see `_CapturedVisit.backward`.
        self.trained = torch.zeros((), device=context.positions_BL.device, requires_grad=True)
        self.pool = torch.cuda.graph_pool_handle() if can_capture() else None
        self.visits: list[_CapturedVisit] = []
        self.begun = 0

    def take(self, context: LoopContext, number: int) -> None:
        """Copy the context of a new pass."""
        if number == self._seen:
            return
        self._seen, self.begun = number, 0
        for kept, new in zip(self._leaves, tree_flatten(context)[0], strict=True):
            if isinstance(new, Tensor):
                kept.copy_(new)

    def run(self, hidden_BLD: Tensor) -> Tensor:
        context = tree_unflatten(self._leaves, self._structure)
        return self._visit(self._layers, self._joined, hidden_BLD, context)

    def claim_gradients(self) -> None:
        """Let `sums` be the weights' gradients, with what those have already."""
        for weight, total in zip(self.weights, self.sums, strict=True):
            if weight.grad is not total:
                if weight.grad is None:
                    total.zero_()
                else:
                    total.copy_(weight.grad)
                weight.grad = total


class _CapturedVisit:
    """The n-th visit of a kind: it runs once as it is, and from then on as two graphs."""

    def __init__(self, kind: _Kind, hidden_BLD: Tensor) -> None:
        self._kind = kind
        self._input = hidden_BLD.detach().clone().requires_grad_()
        self._output = self._gradient = self._input_gradient = self._input
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._ran = False

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        self._input.data.copy_(hidden_BLD)
        self._replay("forward", self._run, None)
        return self._output.detach().clone()

    def backward(self, gradient: Tensor) -> Tensor:
        if self._gradient is self._input:
            self._gradient = torch.empty_like(self._output)
        self._gradient.copy_(gradient)
        self._kind.claim_gradients()
        self._replay("backward", self._differentiate, self._kind.pool)
        # Autograd ties a weight to a stream for as long as a pass refers to it, and a capture fails
        # where it meets a stream other than its own: nothing may refer to one from here on.
        self._output = self._output.detach()
        self._ran = True
        return self._input_gradient.clone()

    def _replay(self, name: str, function: Callable[[], None], pool: Any) -> None:
        # The first run compiles, and lets libraries set themselves up.
        if self._ran and can_capture() and name not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # Other threads may pin memory meanwhile.
            try:
                with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                    function()
            except RuntimeError as error:
                cause = error.__context__ or error
                cause = (str(cause) or type(cause).__name__).splitlines()[0]
                problem = f"compile.graphs=True: the {name} pass of a visit cannot be captured"
                raise UserError(f"{problem}: {cause}; set it to False") from error
            self._graphs[name] = graph
        if name in self._graphs:
            self._graphs[name].replay()
        else:
            function()

    def _run(self) -> None:
        with torch.enable_grad():
            self._output = self._kind.run(self._input)

    def _differentiate(self) -> None:
        self._input_gradient, *gradients = torch.autograd.grad(
            self._output, [self._input, *self._kind.weights], self._gradient, allow_unused=True
        )
        for total, gradient in zip(self._kind.sums, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BLD: Tensor, trained: Tensor, visit: _CapturedVisit) -> Tensor:
        ctx.visit = visit
        return visit.forward(hidden_BLD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.visit.backward(gradient), None, None


class CapturedVisits:
    """A `Visit` that replays graphs of another one in passes with gradients."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._pass = visit, 0
        self._kinds: dict[Any, _Kind] = {}

    def begin_pass(self) -> None:
        """Let the next visit be the first of a new pass."""
        self._pass += 1

    def __call__(
        self,
        layers: Sequence[nn.Module],
        joined: Sequence[Joined | None],
        hidden_BLD: Tensor,
        context: LoopContext,
    ) -> Tensor:
        """Apply the layers; raises `UserError` where they cannot be captured."""
        if not torch.is_grad_enabled():
            return self._visit(layers, joined, hidden_BLD, context)
        leaves, structure = tree_flatten((hidden_BLD, context))
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = (*map(id, layers), structure, shapes)
        if key not in self._kinds:
            self._kinds[key] = _Kind(self._visit, layers, joined, context)
        kind = self._kinds[key]
        kind.take(context, self._pass)
        if kind.begun == len(kind.visits):
            kind.visits.append(_CapturedVisit(kind, hidden_BLD))
        visit = kind.visits[kind.begun]
        kind.begun += 1
        return _Replayed.apply(hidden_BLD, kind.trained, visit)
