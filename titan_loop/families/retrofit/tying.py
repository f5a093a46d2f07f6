"""Tied layers: a looped layer stands for the layers of several passes, adapters for the difference.

    dense layer P + s·C + i  ≈  looped layer i in step s + 1,   i < C,   s < S
    W_i = mean over s of W_{P+sC+i}
    U_s V_s = the best approximation of W_{P+sC+i} − W_i of rank k,   from its singular values

The gain of a norm is first folded into the matrices that read it, W ← W diag(γ), and is then set
to 1: the adapters then cover it, too, and at full rank the loop is the dense model. Of vectors that
no matrix reads, as gains after a branch or of queries, and biases, the mean is taken, too.

Source: Bae et al. 2024 (Relaxed Recursive Transformers), arXiv 2410.20672, §2.2 (average),
§2.3 (singular values). Deviation: gains are folded; the paper ties norms as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

Produced: TypeAlias = tuple[tuple[int, ...], Callable[[torch.dtype], Tensor]]
"""Shape of a new tensor, and a function that makes it in a dtype."""

READS = {
    "attention.qkv_linear.wq": "attention_norm",
    "attention.qkv_linear.wk": "attention_norm",
    "attention.qkv_linear.wv": "attention_norm",
    "attention.wo": None,
    "feed_forward.w1": "ffn_norm",
    "feed_forward.w2": None,
    "feed_forward.w3": "ffn_norm",
}
"""Matrix of a layer → the norm whose output it reads."""


@dataclass(frozen=True, slots=True)
class TiedSpan:
    """Layers of the dense model: P, then S passes of C, then the rest.

    Attributes:
        prelude: P.
        core: C.
        passes: S.
        coda: Number of layers after the passes.
    """

    prelude: int
    core: int
    passes: int
    coda: int

    def behind(self, layer: int) -> list[int]:
        """Return the dense layers that a looped layer stands for, one per step."""
        return [self.prelude + step * self.core + layer for step in range(self.passes)]

    def outside(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of every layer outside the loop: in the dense model, in the new one."""
        for layer in range(self.prelude):
            yield layer, layer
        first = self.prelude + self.passes * self.core
        for layer in range(self.coda):
            yield first + layer, self.prelude + self.core + layer


class Tying:
    """The tensors of a tied model, each made from the dense model's when it is asked for.

    Args:
        rank: k; 0 for no adapters.
        offset: Whether gains are 1 + w.
    """

    def __init__(
        self, span: TiedSpan, rank: int, read: Callable[[str], Tensor], offset: bool
    ) -> None:
        self._span = span
        self._rank = rank
        self._read = read
        self._offset = offset
        self._normed: frozenset[str] = frozenset()
        self._newest: tuple[tuple[int, str], tuple[Tensor, Tensor]] | None = None

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Produced]:
        """Return name → shape and producer of every tensor of the new model.

        Args:
            shapes: Shapes of the dense model's tensors, by name.
        """
        renamed = {name: name for name in shapes if not name.startswith("layers.")}
        for old, new in self._span.outside():
            for name in shapes:
                if name.startswith(f"layers.{old}."):
                    renamed[name.replace(f"layers.{old}.", f"layers.{new}.", 1)] = name
        made: dict[str, Produced] = {
            new: (shapes[old], partial(self._copied, old)) for new, old in renamed.items()
        }
        for layer in range(self._span.core):
            made |= self._looped(layer, shapes)
        return made

    def _looped(self, layer: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Produced]:
        at = f"layers.{self._span.prelude + layer}."
        own = {
            name.removeprefix(at): shape for name, shape in shapes.items() if name.startswith(at)
        }
        folded = {f"{norm}.weight" for norm in READS.values()}
        self._normed = frozenset(folded & own.keys())
        made: dict[str, Produced] = {}
        for name, shape in own.items():
            matrix = name.removesuffix(".weight")
            if name in folded:
                made[f"{at}{name}"] = (
                    shape,
                    partial(_gains, shape, self._offset),
                )
            elif matrix not in READS:
                made[f"{at}{name}"] = shape, partial(self._tied, layer, name)
        for matrix in READS:
            rows, columns = own[f"{matrix}.weight"]
            weight = f"{matrix}.weight"
            made[f"{at}{weight}"] = (rows, columns), partial(self._tied, layer, weight)
            if self._rank:
                sets, rank = self._span.passes, self._rank
                made[f"{at}{matrix}.down"] = (
                    (sets, rank, columns),
                    partial(self._adapter, layer, matrix, 0),
                )
                made[f"{at}{matrix}.up"] = (
                    (sets, rows, rank),
                    partial(self._adapter, layer, matrix, 1),
                )
        return made

    def _copied(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._read(name).to(dtype)

    def _folded(self, layer: int, name: str) -> Tensor:
        """Return a tensor of the dense model, a matrix with its norm's gain, in float64."""
        weight = self._read(f"layers.{layer}.{name}").double()
        norm = f"{READS.get(name.removesuffix('.weight'))}.weight"
        if norm in self._normed:
            weight *= self._read(f"layers.{layer}.{norm}").double() + self._offset
        return weight

    def _tied(self, layer: int, name: str, dtype: torch.dtype) -> Tensor:
        behind = self._span.behind(layer)
        total = self._folded(behind[0], name)
        for other in behind[1:]:
            total += self._folded(other, name)
        return (total / len(behind)).to(dtype)

    def _adapter(self, layer: int, matrix: str, part: int, dtype: torch.dtype) -> Tensor:
        """Return V or U of all sets; the other one is asked for next."""
        if self._newest is None or self._newest[0] != (layer, matrix):
            weight = f"{matrix}.weight"
            tied = self._tied(layer, weight, torch.float64)
            pairs = [
                low_rank(self._folded(source, weight) - tied, self._rank)
                for source in self._span.behind(layer)
            ]
            downs, ups = zip(*pairs, strict=True)
            self._newest = (layer, matrix), (torch.stack(downs), torch.stack(ups))
        return self._newest[1][part].to(dtype)


def low_rank(residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return V (k × columns) and U (rows × k), whose product is closest to a matrix.

    Both get the square roots of the singular values. Beyond the matrix's own rank they are zero.
    """
    u, values, v = torch.linalg.svd(residual, full_matrices=False)
    roots = values[:rank].sqrt()
    down, up = roots[:, None] * v[:rank], u[:, :rank] * roots
    missing = rank - len(roots)
    if missing:
        down = torch.cat([down, down.new_zeros(missing, down.shape[1])])
        up = torch.cat([up, up.new_zeros(up.shape[0], missing)], dim=1)
    return down, up


def _gains(shape: tuple[int, ...], offset: bool, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 0.0 if offset else 1.0, dtype=dtype)
