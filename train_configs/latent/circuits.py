"""Circuits of a latent-space model, read from its layers at the name after an equals sign.

    probe x1 + x2 + x3 = y ─► heads of the first layer, names changed ─► relative variance ─► groups
                           ─► heads of the last layer, values changed ─► the same
    OV matrices of the groups × embeddings of a factor ─► norm amplification
    all m³ values ─► MLP before and after its gate, its output, logits ─► 3-D DFT, by frequencies
    equations of test graphs at the step that should solve them ─► the part that went wrong

Every analysis runs a single step from given values: for a probe, the values of all nodes before its
equation; for a test graph, the values that are worked out by then. If a task's nodes have at most
two parents, a probe has fewer operands, and the DFT fewer dimensions.

Source: arXiv 2510.14095, section 5 and Appendix C (Eq. 11, 12 and the groups of C.4.2; error
classes of C.5).
Deviations: a head belongs to the name or value that moves it most, if its relative variance is
above `_MOVED`; amplification includes the gain of the norm before the attention; a copied value is
compared with the mean output for it over equations that come out right, not with its embedding
after the OV matrix, because the state here also holds the first layer's output.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titan_loop.families.latent.model import LatentDecoder
from titan_loop.models.positions import every_head

from .task import DagArithmetic, Graph, Node, Size, combined

Floats = NDArray[np.float64]

MOST_OPERANDS = 3
FACTORS = ("value", "syntax", "variable", "operation")
SITES = ("mlp_pre", "mlp_post", "mlp_out", "logits")
_MOVED = 0.3
"""Relative variance above which a head counts as moved."""

_ATTENDED, _COPIED = 0.5, 0.9
"""Thresholds of `classify_errors`: an error is the first layer's if a group's mean attention on its
name is lower, and the copy's if the cosine of a group's output with the usual one is lower."""


def relative_variance(outputs_MD: Tensor) -> float:
    """Return tr Cov(o) / mean ‖o‖² of M outputs."""
    centred_MD = outputs_MD - outputs_MD.mean(dim=0)
    return float(centred_MD.square().sum(dim=1).mean() / outputs_MD.square().sum(dim=1).mean())


def norm_amplification(matrix: Tensor, vectors_MD: Tensor) -> float:
    """Return the mean of ‖W x‖ / ‖x‖ over M vectors."""
    return float(((vectors_MD @ matrix.T).norm(dim=1) / vectors_MD.norm(dim=1)).mean())


def frequency_groups(outputs: Floats) -> dict[str, float]:
    """Return the mean norm of the DFT of outputs (m, …, m, D), by pattern of the frequencies.

    A pattern marks frequencies that are 0, and equal ones among the others, in any order. Three
    dimensions have seven: `0 0 0`, `j 0 0`, `j j 0`, `j k 0`, `j j j`, `j j k` and `j k l`.
    """
    modulus, operands = outputs.shape[0], outputs.ndim - 1
    norms = np.linalg.norm(np.fft.fftn(outputs, axes=range(operands)), axis=-1) / modulus**operands
    sums: dict[str, list[float]] = {name: [] for name in frequency_patterns(operands)}
    for place in np.ndindex(*norms.shape):
        sums[_pattern(place)].append(float(norms[place]))
    return {name: float(np.mean(values)) if values else 0.0 for name, values in sums.items()}


def frequency_patterns(operands: int) -> list[str]:
    """Return the patterns of `operands` frequencies, by increasing number of non-zero ones."""
    names = {_pattern(place) for place in product(range(operands + 1), repeat=operands)}
    return sorted(names, key=lambda name: (-name.count("0"), len(set(name))))


def _pattern(frequencies: Sequence[int]) -> str:
    counts = Counter(frequency for frequency in frequencies if frequency)
    letters = [
        letter
        for letter, (_, count) in zip("jkl", counts.most_common(), strict=False)
        for _ in range(count)
    ]
    return " ".join([*letters, *"0" * (len(frequencies) - len(letters))])


class Probe(NamedTuple):
    """A graph whose last equation is examined.

    Attributes:
        factors: Factors of the graph before the step, (L, 4).
        operands: Positions of the names on the left of the last equation.
        solved_at: Positions after the equals signs of the nodes that the operands name.
        result: Position of the last name.
        sources: Positions after the equals signs of all nodes but the last.
    """

    factors: Tensor
    operands: tuple[int, ...]
    solved_at: tuple[int, ...]
    result: int
    sources: tuple[int, ...]


def probe_of(
    task: DagArithmetic,
    graph: Graph,
    parents: Sequence[int],
    name: int,
    operations: tuple[str, ...] = (),
    *,
    at_its_step: bool = False,
) -> Probe:
    """Append an equation to a graph.

    Args:
        task: The task that the graph is of.
        graph: Nodes before the equation.
        parents: Indices of the nodes on its left.
        name: Name of the node that it defines.
        operations: Operations between the parents; by default the task's first one everywhere.
        at_its_step: Whether to leave values EMPTY that are not worked out before the step that
            solves the equation; otherwise all values but the last are told.
    """
    operations = operations or (task.operations[0],) * (len(parents) - 1)
    value = combined(operations, [graph[p].value for p in parents], task.modulus)
    depth = 1 + max(graph[parent].depth for parent in parents)
    question = (*graph, Node(name, (*parents,), operations, value, depth))
    example = task.encode(question)
    depths = example.columns["depth"]
    written = [node.name for node in task.in_order(question)]
    results_in_order = dict(zip(written, np.flatnonzero(depths).tolist(), strict=True))
    results = [results_in_order[node.name] for node in question]
    told = depths < depth if at_its_step else np.arange(len(depths)) != results[-1]
    told = np.where(told, example.labels, example.tokens)
    factors = np.concatenate([told[:, None], example.columns["factors"]], axis=1)
    end = results[-1] - 1  # the equals sign
    return Probe(
        torch.from_numpy(factors),
        tuple(range(end - 2 * len(parents) + 1, end, 2)),
        tuple(results[parent] for parent in parents),
        results[-1],
        tuple(results[:-1]),
    )


def places(operands: int) -> list[str]:
    """Return the names of an equation's places and groups: its operands, then its result."""
    return [*(f"operand {number + 1}" for number in range(operands)), "result"]


@dataclass
class Seen:
    """Activations of one step at the result of every probe.

    Attributes:
        heads: Layer → (M, N, D) outputs of its heads, each through its part of W_O.
        attention: Layer → (M, N, L) weights.
        sites: Site → (M, …).
        values: (M,) values that the step predicts.
    """

    heads: dict[int, Tensor]
    attention: dict[int, Tensor]
    sites: dict[str, Tensor]
    values: Tensor


@torch.no_grad()
def look(model: LatentDecoder, factors_MLF: Tensor, results: Sequence[int]) -> Seen:
    """Run one step on given states and keep the activations at one position of each."""
    rows, at = torch.arange(len(factors_MLF)), torch.tensor(results)
    heads: dict[int, Tensor] = {}
    attention: dict[int, Tensor] = {}
    sites: dict[str, Tensor] = {}

    def keep_heads(layer: int, out_DNH: Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, named: Any, out: Tensor) -> None:
            heads[layer] = torch.einsum("mnh,dnh->mnd", out[rows, at], out_DNH)
            attention[layer] = _weights(*given[:2], **named)[rows, :, at]

        return hook

    def keep(site: str, side: int) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, out: Tensor) -> None:
            sites[site] = (given[0] if side == 0 else out)[rows, at].clone()

        return hook

    layers: list[Any] = list(model.layers.values())
    with _hooked() as hooks:
        for number, layer in enumerate(layers):
            inner, out_DX = layer.attention.inner_attention, layer.attention.wo.weight
            hook = keep_heads(number, out_DX.unflatten(1, (layer.attention.n_heads, -1)))
            hooks.append(inner.register_forward_hook(hook, with_kwargs=True))
        last = layers[-1].feed_forward
        hooks.append(last.w1.register_forward_hook(keep("mlp_pre", 1)))
        hooks.append(last.w2.register_forward_hook(keep("mlp_post", 0)))
        hooks.append(last.w2.register_forward_hook(keep("mlp_out", 1)))
        values_ML = factors_MLF[..., 0]
        context = model.make_context(values_ML, columns={"factors": factors_MLF[..., 1:]})
        hidden_MLD = model.read(model.step(model.start(values_ML, context), 1, context), context)
    sites["logits"] = model.lm_head(hidden_MLD[rows, at].unsqueeze(1)).squeeze(1)
    return Seen(heads, attention, sites, sites["logits"].argmax(dim=-1))


@contextmanager
def _hooked() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def _weights(
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    *,
    attention_masks: Tensor | None,
    scale: float | None = None,
    scores_BNLS: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the attention weights (B, N, L, S) of the kernel's arguments."""
    k_BLNH = every_head(k_BLNH, q_BLNH.shape[2])
    scores = q_BLNH.transpose(1, 2) @ k_BLNH.permute(0, 2, 3, 1)
    if scores_BNLS is not None:
        scores = scores + scores_BNLS
    if attention_masks is None:
        attention_masks = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    scores = scores * (q_BLNH.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~attention_masks, -torch.inf).softmax(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Circuits:
    """Measured circuits; JSON through `asdict`.

    Attributes:
        name_variance: Relative variance of every head of the first layer, where one name of the
            equation changes: (operands + 1, heads), the defined name last.
        value_variance: The same for the last layer, where one value changes: (operands, heads).
        name_groups: Heads of the first layer that belong to each name, the defined name last.
        value_groups: Heads of the last layer that belong to each value.
        amplification: Group → factor → norm amplification of its OV matrix.
        frequencies: Site → pattern → mean norm of the DFT.
        right: Share of the probe's combinations of values that the step solves.
    """

    name_variance: list[list[float]]
    value_variance: list[list[float]]
    name_groups: list[list[int]]
    value_groups: list[list[int]]
    amplification: dict[str, dict[str, float]]
    frequencies: dict[str, dict[str, float]]
    right: float


def find_circuits(
    model: LatentDecoder, task: DagArithmetic, *, nodes: int, samples: int = 128, seed: int = 0
) -> Circuits:
    """Measure the circuits with a probe equation that follows one held-out graph.

    Args:
        model: Model in evaluation mode, not sharded.
        task: Its training task.
        nodes: Number of nodes of the graph; at least as many as the probe has operands.
        samples: Number of names tried at each place of the equation; of values, all m are tried.
        seed: Seed that chooses the graph and the changes.
    """
    (graph,) = task.held_out_questions(1, Size(nodes, None), seed=seed)
    generator = random.Random(seed)
    used = {node.name for node in graph}
    unused = [name for name in range(task.names) if name not in used]
    operands = min(MOST_OPERANDS, task.most_parents)
    parents = generator.sample(range(nodes), operands)
    last = len(model.layers) - 1

    def variance_of(probes: Sequence[Probe]) -> list[float]:
        states = torch.stack([probe.factors for probe in probes])
        seen = look(model, states, [probe.result for probe in probes])
        return [relative_variance(o) for o in seen.heads[0].unbind(dim=1)]

    probe = probe_of(task, graph, parents, unused[0])
    names, values = [], []
    for operand in range(operands):
        changed = [[*parents] for _ in range(samples)]
        free = [p for p in range(nodes) if p not in parents or p == parents[operand]]
        for choice in changed:
            choice[operand] = generator.choice(free)
        names.append(variance_of([probe_of(task, graph, c, unused[0]) for c in changed]))
        states = probe.factors.repeat(task.modulus, 1, 1)
        states[:, probe.solved_at[operand], 0] = torch.arange(task.modulus)
        seen = look(model, states, [probe.result] * task.modulus)
        values.append([relative_variance(o) for o in seen.heads[last].unbind(dim=1)])
    defined = [generator.choice(unused) for _ in range(samples)]
    names.append(variance_of([probe_of(task, graph, parents, name) for name in defined]))
    name_groups, value_groups = _groups(names), _groups(values)
    frequencies, right = _frequencies(model, task, probe)
    return Circuits(
        name_variance=names,
        value_variance=values,
        name_groups=name_groups,
        value_groups=value_groups,
        amplification={
            f"layer {layer + 1}, {place}": _amplification(model, layer, group)
            for layer, groups in ((0, name_groups), (last, value_groups))
            for place, group in zip(places(operands), groups, strict=False)
            if group
        },
        frequencies=frequencies,
        right=right,
    )


def _groups(variance: Sequence[Sequence[float]]) -> list[list[int]]:
    table = np.array(variance)
    best = table.argmax(axis=0)
    return [
        [h for h in range(table.shape[1]) if best[h] == operand and table[operand, h] > _MOVED]
        for operand in range(len(table))
    ]


def _amplification(model: LatentDecoder, layer: int, group: Sequence[int]) -> dict[str, float]:
    """Return factor → amplification of Σ_h W_O^h W_V^h diag(gain) over the heads of a group."""
    block: Any = list(model.layers.values())[layer]
    attention, width = block.attention, block.attention.head_dim
    shared = attention.n_heads // attention.n_kv_heads
    of_values, out = attention.qkv_linear.wv.weight, attention.wo.weight
    matrix = torch.zeros(out.shape[0], of_values.shape[1])
    for head in group:
        rows = slice(head // shared * width, (head // shared + 1) * width)
        matrix += (out[:, head * width : (head + 1) * width] @ of_values[rows]).detach()
    matrix = matrix * block.attention_norm.weight.detach()
    tables = model.tok_embeddings.weight.detach().split(model.config.sizes)
    return {
        factor: norm_amplification(matrix, table)
        for factor, table in zip(FACTORS, tables, strict=True)
    }


def _frequencies(
    model: LatentDecoder, task: DagArithmetic, probe: Probe
) -> tuple[dict[str, dict[str, float]], float]:
    """Return site → pattern → norm over all values of a probe, and the share that is right."""
    m, operands = task.modulus, len(probe.operands)
    grid = torch.cartesian_prod(*[torch.arange(m)] * operands).view(-1, operands)
    parts: dict[str, list[Tensor]] = {site: [] for site in SITES}
    right = 0
    for values in grid.split(256):
        states = probe.factors.repeat(len(values), 1, 1)
        for operand, at in enumerate(probe.solved_at):
            states[:, at, 0] = values[:, operand]
        seen = look(model, states, [probe.result] * len(values))
        for site in SITES:
            parts[site].append(seen.sites[site])
        operations = (task.operations[0],) * (operands - 1)
        wanted = [combined(operations, row, m) for row in values.tolist()]
        right += int((seen.values == torch.tensor(wanted)).sum())
    return {
        site: frequency_groups(torch.cat(tensors).double().view(*[m] * operands, -1).numpy())
        for site, tensors in parts.items()
    }, right / m**operands


def classify_errors(
    model: LatentDecoder, task: DagArithmetic, circuits: Circuits, graphs: Sequence[Graph]
) -> Mapping[str, int]:
    """Count equations by result: solved at their step, or the part of the model that failed.

    The first layer failed if the attention of a group on its name is below `_ATTENDED`. Otherwise
    the copy failed if the output of a group of the last layer has a cosine below `_COPIED` with its
    mean output for the same value in solved equations. Otherwise the feed-forward layer failed.
    Only equations with as many operands as the probe are counted, because the groups belong to its
    operands.

    Args:
        model: Model in evaluation mode, not sharded.
        task: Its training task.
        circuits: Result of `find_circuits` for this model.
        graphs: Graphs whose equations are counted.
    """
    last = len(model.layers) - 1
    looked: list[_Solving] = []
    for graph in graphs:
        for index, node in enumerate(graph):
            if len(node.parents) == len(circuits.value_groups):
                before, equation = graph[:index], (node.parents, node.name, node.operations)
                probe = probe_of(task, before, *equation, at_its_step=True)
                seen = look(model, probe.factors.unsqueeze(0), [probe.result])
                values = [graph[parent].value for parent in node.parents]
                looked.append(_Solving(seen, probe, node.value, values))
    counts = {"right": 0, "first attention": 0, "copy": 0, "feed-forward": 0}
    for solving in looked:
        counts[_class(solving, looked, circuits, last)] += 1
    return counts


class _Solving(NamedTuple):
    """An equation at the step that should solve it, with its value and its operands' values."""

    seen: Seen
    probe: Probe
    value: int
    operands: list[int]

    @property
    def is_right(self) -> bool:
        """Whether the step predicts the value."""
        return int(self.seen.values[0]) == self.value

    def copied(self, layer: int, group: Sequence[int]) -> Tensor:
        """Return the output of a group of heads of a layer."""
        return self.seen.heads[layer][0, group].flatten()


def _class(solving: _Solving, looked: Sequence[_Solving], circuits: Circuits, last: int) -> str:
    if solving.is_right:
        return "right"
    for at, group in zip(solving.probe.operands, circuits.name_groups, strict=False):
        if group and solving.seen.attention[0][0, group, at].mean() < _ATTENDED:
            return "first attention"
    for operand, group in enumerate(circuits.value_groups):
        value = solving.operands[operand]
        same = [
            other.copied(last, group)
            for other in looked
            if group and other.is_right and other.operands[operand] == value
        ]
        if same:
            usual = torch.stack(same).mean(dim=0)
            if torch.cosine_similarity(solving.copied(last, group), usual, dim=0) < _COPIED:
                return "copy"
    return "feed-forward"
