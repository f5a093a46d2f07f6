"""Weights in the layers' dtype on one device, cast once a step for all visits and micro-batches.

    first pass of a step      parameter, fp32 ─ cast ─► leaf, bf16, in its module's place
    every visit, backward     contribution, bf16 ─ cast ─► + fp32 gradient of the leaf
    end of the step           parameter back in its place, with that gradient

Optimisers, checkpoints and averages see the parameters alone. FSDP of one rank computes the same
with hooks, gathers and copies at every visit, and adds the visits' contributions up in bf16.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_loop.models.joined import Joinable, Joined, Product


class LowWeights:
    """Leaves of a lower dtype in the place of a model's parameters, from a pass to its step's end.

    Passes with gradients enter by themselves; the caller leaves after the step's last backward
    pass. Passes without leave by themselves.

    Args:
        model: Its parameters are on their device when it is first called.
        wide: Modules whose parameters compute in their own dtype.
        joinable: By a layer's index, matrices that its visits multiply as one.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        wide: Iterable[nn.Module],
        joinable: Mapping[int, Joinable],
    ) -> None:
        self._model, self._dtype, self._joinable = model, dtype, joinable
        self._wide = [*wide]
        self._leaves: dict[nn.Parameter, nn.Parameter] = {}
        self._rows: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._entered = False
        self._alone: nn.Module | None = None  # whose call without gradients entered
        self.joined: dict[int, Joined] = {}

    def cover(self, module: nn.Module) -> None:
        """Enter when `module` is called, the model or a part that is called outside of it."""
        module.register_forward_pre_hook(lambda *_: self._enter(module))
        module.register_forward_hook(lambda *_: self._leave_after(module), always_call=True)

    def _leave_after(self, module: nn.Module) -> None:
        if self._alone is module:
            self.leave()

    def _enter(self, module: nn.Module) -> None:
        if self._entered:
            return
        self._entered, self._alone = True, None if torch.is_grad_enabled() else module
        if not self._leaves:  # not before: a model may be built on another device than it runs on
            self._make()
        with torch.no_grad():
            low = [leaf.data for leaf in self._leaves.values()]
            wide = [parameter.data for parameter in self._leaves]
            torch._foreach_copy_(low, wide)  # pyright: ignore[reportPrivateImportUsage]
        for parameters, name, parameter in self._places:
            parameters[name] = self._leaves[parameter]

    def leave(self) -> None:
        """Put the parameters back, and add the casts' gradients to theirs."""
        if not self._entered:
            return
        for parameters, name, parameter in self._places:
            parameters[name] = parameter
        for parameter, gradient in self._gradients():
            if parameter.grad is not None:
                gradient = parameter.grad.add_(gradient)
            parameter.grad = gradient
        self._entered, self._alone = False, None

    def _make(self) -> None:
        # Not before: a model that leaves the meta device gets new parameters.
        wide = {id(parameter) for module in self._wide for parameter in module.parameters()}
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in wide:
                    self._places.append((module._parameters, name, parameter))
        for index, joinable in self._joinable.items():
            self.joined[index] = Joined(*(self._join(linears) for linears in joinable))
        for _, _, parameter in self._places:
            if parameter not in self._leaves:  # tied weights are in several places
                low = torch.empty_like(parameter.data, dtype=self._dtype)
                self._leaves[parameter] = _leaf(low, parameter)

    def _join(self, linears: Sequence[nn.Linear]) -> Product:
        """Return joined leaves; each matrix's own leaf has its rows of their memory."""
        weight = self._joined_leaf([linear.weight for linear in linears])
        if linears[0].bias is None:
            return weight, None
        return weight, self._joined_leaf([linear.bias for linear in linears])

    def _joined_leaf(self, parts: list[Any]) -> nn.Parameter:
        joined = _leaf(torch.cat([part.data for part in parts]).to(self._dtype), parts[0])
        self._rows.append((joined, parts))
        for part, rows in zip(parts, joined.data.split([len(p) for p in parts]), strict=True):
            self._leaves[part] = _leaf(rows, part)
        return joined

    def _gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter, leaf in self._leaves.items():
            if leaf.grad is not None:
                yield parameter, leaf.grad
                leaf.grad = None
        for joined, parts in self._rows:
            if joined.grad is not None:
                yield from zip(parts, joined.grad.split([len(p) for p in parts]), strict=True)
                joined.grad = None


def _leaf(low: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(low, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        leaf.grad_dtype = parameter.dtype  # autograd casts every contribution before it adds
    return leaf
