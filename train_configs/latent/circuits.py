"""Circuits of a latent-space model, read from its layers at the name after an equals sign.

    probe x1 + x2 + x3 = y ─► heads of the first layer, names changed ─► relative variance ─► groups
                           ─► heads of the last layer, values changed ─► the same
    all m³ values ─► MLP before and after its gate, its output, logits ─► 3-D DFT, by frequencies

Every analysis runs a single step from the values of all nodes before the probe's equation. If a
task's nodes have at most two parents, a probe has fewer operands, and the DFT fewer dimensions.

Source: arXiv 2510.14095, section 5 and Appendix C (Eq. 11, 12 and the groups of C.4.2).
Deviation: a head belongs to the name or value that moves it most, if its relative variance is above
`_MOVED`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titan_loop.analysis.drawing import COLORS, Axes, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.errors import require_at_least
from titan_loop.families.latent.model import LatentDecoder

from .solved import open_run
from .task import DagArithmetic, Graph, Node, Size, combined

Floats = NDArray[np.float64]

MOST_OPERANDS = 3
SITES = ("mlp_pre", "mlp_post", "mlp_out", "logits")
_MOVED = 0.3
"""Relative variance above which a head counts as moved."""


def relative_variance(outputs_MD: Tensor) -> float:
    """Return tr Cov(o) / mean ‖o‖² of M outputs."""
    centred_MD = outputs_MD - outputs_MD.mean(dim=0)
    return float(centred_MD.square().sum(dim=1).mean() / outputs_MD.square().sum(dim=1).mean())


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
        factors: Factors of the graph before the step, (L, 4); all values but the last are told.
        solved_at: Positions after the equals signs of the nodes that the operands name.
        result: Position of the last name.
    """

    factors: Tensor
    solved_at: tuple[int, ...]
    result: int


def probe_of(task: DagArithmetic, graph: Graph, parents: Sequence[int], name: int) -> Probe:
    """Append an equation to a graph.

    Args:
        task: The task that the graph is of.
        graph: Nodes before the equation.
        parents: Indices of the nodes on its left; the task's first operation joins them.
        name: Name of the node that it defines.
    """
    operations = (task.operations[0],) * (len(parents) - 1)
    value = combined(operations, [graph[p].value for p in parents], task.modulus)
    depth = 1 + max(graph[parent].depth for parent in parents)
    question = (*graph, Node(name, (*parents,), operations, value, depth))
    example = task.encode(question)
    written = [node.name for node in task.in_order(question)]
    found = np.flatnonzero(example.columns["depth"]).tolist()
    results = dict(zip(written, found, strict=True))
    told = np.where(np.arange(len(example.tokens)) != results[name], example.labels, example.tokens)
    factors = np.concatenate([told[:, None], example.columns["factors"]], axis=1)
    solved_at = tuple(results[graph[parent].name] for parent in parents)
    return Probe(torch.from_numpy(factors), solved_at, results[name])


def places(operands: int) -> list[str]:
    """Return the names of an equation's places and groups: its operands, then its result."""
    return [*(f"operand {number + 1}" for number in range(operands)), "result"]


class Seen(NamedTuple):
    """Activations of one step at the result of every probe.

    Attributes:
        heads: Layer → (M, N, D) outputs of its heads, each through its part of W_O.
        sites: Site → (M, …).
        values: (M,) values that the step predicts.
    """

    heads: dict[int, Tensor]
    sites: dict[str, Tensor]
    values: Tensor


@torch.no_grad()
def look(model: LatentDecoder, factors_MLF: Tensor, results: Sequence[int]) -> Seen:
    """Run one step on given states and keep the activations at one position of each."""
    rows, at = torch.arange(len(factors_MLF)), torch.tensor(results)
    heads: dict[int, Tensor] = {}
    sites: dict[str, Tensor] = {}

    def keep_heads(layer: int, out_DNH: Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, out: Tensor) -> None:
            heads[layer] = torch.einsum("mnh,dnh->mnd", out[rows, at], out_DNH)

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
            hooks.append(inner.register_forward_hook(hook))
        last = layers[-1].feed_forward
        hooks.append(last.w1.register_forward_hook(keep("mlp_pre", 1)))
        hooks.append(last.w2.register_forward_hook(keep("mlp_post", 0)))
        hooks.append(last.w2.register_forward_hook(keep("mlp_out", 1)))
        values_ML = factors_MLF[..., 0]
        context = model.make_context(values_ML, columns={"factors": factors_MLF[..., 1:]})
        hidden_MLD = model.read(model.step(model.start(values_ML, context), 1, context), context)
    sites["logits"] = model.lm_head(hidden_MLD[rows, at].unsqueeze(1)).squeeze(1)
    return Seen(heads, sites, sites["logits"].argmax(dim=-1))


@contextmanager
def _hooked() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class Circuits:
    """Measured circuits; JSON through `asdict`.

    Attributes:
        name_variance: Relative variance of every head of the first layer, where one name of the
            equation changes: (operands + 1, heads), the defined name last.
        value_variance: The same for the last layer, where one value changes: (operands, heads).
        name_groups: Heads of the first layer that belong to each name, the defined name last.
        value_groups: Heads of the last layer that belong to each value.
        frequencies: Site → pattern → mean norm of the DFT.
        right: Share of the probe's combinations of values that the step solves.
    """

    name_variance: list[list[float]]
    value_variance: list[list[float]]
    name_groups: list[list[int]]
    value_groups: list[list[int]]
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
    frequencies, right = _frequencies(model, task, probe)
    return Circuits(
        name_variance=names,
        value_variance=values,
        name_groups=_groups(names),
        value_groups=_groups(values),
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


def _frequencies(
    model: LatentDecoder, task: DagArithmetic, probe: Probe
) -> tuple[dict[str, dict[str, float]], float]:
    """Return site → pattern → norm over all values of a probe, and the share that is right."""
    m, operands = task.modulus, len(probe.solved_at)
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


def circuits(run: Path, *, nodes: int | None = None, samples: int = 128, seed: int = 0) -> Findings:
    """Find the heads that copy names and values, and the form of the sums.

    Groups heads by relative variance, and measures the DFT of the last layer's feed-forward
    activations and the logits over all values of the operands. Writes evals/circuits-step-N.json
    and a plot.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        nodes: Number of nodes of the probe's graph; by default as in training.
        samples: Number of names tried at each place of the probe's equation.
        seed: Seed of the probe's graph and names.
    """
    loaded, model, task = open_run(run, nodes)
    nodes = nodes or task.nodes
    require_at_least(4, nodes=nodes)
    require_at_least(2, samples=samples)
    found = find_circuits(model, task, nodes=nodes, samples=samples, seed=seed)
    figure = Figure(
        "Sums in the frequency domain",
        "Mean norm of the DFT over all values of the operands, by pattern of frequencies; where "
        "all are equal (j j, j j j), it is a function of the sum.",
        partial(_draw, found.frequencies),
    )
    return Findings(
        name="circuits",
        loaded=loaded,
        record={"nodes": nodes, "seed": seed, **asdict(found)},
        lines=[f"{100 * found.right:.1f} % of the probe's values are right"],
        figures={"frequencies.png": figure},
        tables=circuit_tables(found),
    )


def circuit_tables(found: Circuits) -> dict[str, list[list[str]]]:
    """Return title → rows, the header first."""
    named = places(len(found.value_groups))
    heads = [["heads that belong to", *named]]
    for name, groups in (("names", found.name_groups), ("values", found.value_groups)):
        cells = [" ".join(map(str, group)) or "-" for group in groups]
        heads.append([name, *cells, *[""] * (len(named) - len(groups))])
    norms = [["mean norm of the DFT", *next(iter(found.frequencies.values()))]]
    for site, patterns in found.frequencies.items():
        norms.append([site, *(f"{value:.3g}" for value in patterns.values())])
    return {"Heads by the change they respond to": heads, "Frequencies of the last layer": norms}


def _draw(frequencies: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    def draw(axes: Axes, site: str) -> None:
        norms = frequencies[site]
        axes.barh(list(norms), np.array([*norms.values()]) / max(norms.values()), color=COLORS[0])
        axes.invert_yaxis()
        axes.set_xlabel("mean norm over the largest")

    site, norms = list(frequencies.items())[-1]
    largest = max(norms, key=norms.__getitem__)
    title = f"In {site} the values' frequencies {largest} are strongest (equal letters: equal)"
    label = "frequencies of the values"
    return draw_panels(
        list(frequencies), draw, path, title=title, label=label, columns=4, inches=(3.0, 2.8)
    )
