"""A looped model as an ONNX graph: every layer once, in a loop that ends when a token exits.

    input_ids ─► embedding ─► prelude ─► Loop: layers, norm, (coda, gate) ─► (coda) ─► head
    past_keys, past_values ─► each visit's slot ─► present_keys, present_values

| input | |
|---|---|
| `input_ids` | (1, L) int64: a prompt, or the latest token |
| `past_keys`, `past_values` | (slots, 1, K, S, H) of S earlier tokens: prelude, coda, steps |
| `steps` | R, int64: most steps of this call |
| `threshold` | q of the Q-exit, fp32; 1 runs all steps. Absent in a model without a gate |

`logits` (1, V) are the last token's, of step `exit_step`. A prompt, which is several tokens or the
first one, runs all steps; a later token ends the loop where it exits. Deeper steps of later tokens
see the keys of its last step, as with `kv_cache=full` (`titan_loop/inference/cache.py`). A past of
fewer steps than R is read in the same way, so R may change from call to call.
"""

import numpy as np
from onnx import GraphProto  # pyright: ignore[reportMissingImports]  the extra `onnx`

from titan_loop.formats.llama_shape import EMBEDDING, HEAD
from titan_loop.formats.onnx_graph import BOOL, FLOAT, INT64, Carried, Graph, value
from titan_loop.formats.onnx_layers import Layers
from titan_loop.formats.onnx_shape import GATE, OnnxShape

_PAST = ("past_keys", "past_values")
_PRESENT = ("present_keys", "present_values")

Pair = tuple[str, str]
"""Keys and values of new tokens: of a layer, (1, L, K·H), or of several, (layers, L, K·H)."""


class LoopGraph:
    """The graph of a model.

    Args:
        graph: An empty graph.
    """

    def __init__(self, graph: Graph, shape: OnnxShape) -> None:
        self.graph, self.shape = graph, shape
        self.length = graph.add("Shape", "input_ids", start=1, end=2)
        self.past = graph.add("Shape", _PAST[0], start=3, end=4)
        self.layers = Layers(graph, shape, self.length, self.past)
        self.per_step, self.outside = len(self.shape.looped), sum(map(len, self.shape.outside))
        slots = graph.add("Sub", graph.size(_PAST[0], 0), graph.constant(self.outside))
        self.stored = graph.add("Div", slots, graph.constant(self.per_step))
        self.deepest = graph.add("Sub", self.stored, graph.constant(1))

    def build(self) -> GraphProto:
        """Return the whole graph."""
        graph, shape = self.graph, self.shape
        x = graph.scaled(self._embedded(), shape.embedding_factor())
        x, prelude = self._outside(graph, 0, x)
        token, looped, coda = self._loop(x)
        new = [
            self._by_slot([pair[side] for pair in (*prelude, *coda)], looped[side])
            for side in (0, 1)
        ]
        self._append(new)
        head = EMBEDDING if shape.tie_weights else HEAD
        if graph.bits == 32:  # as the embedding has it, if they are tied
            logits = graph.add("Gemm", token, graph.weight(head, graph.read(head)), transB=1)
        else:
            logits = graph.add("MatMul", token, graph.matrix(HEAD, graph.read(head)))
        logits = graph.scaled(logits, shape.block["logit_scale"])
        if cap := shape.block["logit_softcap"]:
            logits = graph.scaled(graph.add("Tanh", graph.scaled(logits, 1 / cap)), cap)
        graph.many("Identity", logits, outputs=["logits"])
        past, present = self._dims("slots", "past"), self._dims("present_slots", "present")
        inputs = [value("input_ids", INT64, [1, "length"])]
        inputs += [value(name, FLOAT, past) for name in _PAST]
        inputs += [value("steps", INT64, [])]
        inputs += [value("threshold", FLOAT, [])] if shape.exit_gate else []
        outputs = [value("logits", FLOAT, [1, shape.vocab_size])]
        outputs += [value(name, FLOAT, present) for name in _PRESENT]
        return graph.proto(inputs, [*outputs, value("exit_step", INT64, [])])

    def _embedded(self) -> str:
        graph, table_VD = self.graph, self.graph.read(EMBEDDING)
        if graph.bits == 32:
            return graph.add("Gather", graph.weight(EMBEDDING, table_VD), "input_ids")
        # In 8 bits of either type: rows of 4 cannot be gathered.
        scale_V1 = np.abs(table_VD).max(1, keepdims=True).clip(1e-30) / 127
        rows_VD = np.rint(table_VD / scale_V1).astype(np.int8)
        rows = graph.add("Gather", graph.weight(EMBEDDING, rows_VD), "input_ids")
        scales = graph.add("Gather", graph.weight(f"{EMBEDDING}.scale", scale_V1), "input_ids")
        return graph.add("Mul", graph.add("Cast", rows, to=FLOAT), scales)

    def _dims(self, slots: str, tokens: str) -> list[int | str]:
        return [slots, 1, self.shape.n_kv_heads, tokens, self.shape.head_dim]

    def _slot(self, graph: Graph, slot: str) -> Pair:
        keys, values = (graph.add("Gather", name, slot) for name in _PAST)
        return keys, values

    def _outside(self, graph: Graph, side: int, x: str) -> tuple[str, list[Pair]]:
        """Apply the layers before (0) or after (1) the loop."""
        new: list[Pair] = []
        for slot, index in enumerate(self.shape.outside[side], side * self.shape.prelude_layers):
            x, pair = self.layers.visit(graph, index, x, self._slot(graph, graph.constant(slot)))
            new.append(pair)
        return x, new

    def _token(self, graph: Graph, x: str) -> tuple[str, list[Pair]]:
        """Return what head and gate read of the last token, (1, D), and the coda's new keys."""
        x, coda = self._outside(graph, 1, x)
        token = graph.add("Gather", x, graph.constant(-1), axis=1)
        if coda or self.shape.norm_placement == "readout":
            token = graph.norm(token, "model.norm")
        return token, coda

    def _step(self, body: Graph, state: str, prepared: str) -> tuple[str, Pair]:
        """Return the state after a step, and the step's new keys and values."""
        entered = x = self.shape.input(body, state, prepared)
        row = body.add("Min", f"{body.prefix}step", self.deepest)
        row = body.add("Mul", row, body.constant(self.per_step))
        new: list[Pair] = []
        for slot, index in enumerate(self.shape.looped, self.outside):
            place = body.add("Add", row, body.constant(slot))
            x, pair = self.layers.visit(body, index, x, self._slot(body, place))
            new.append(pair)
        if self.shape.norm_placement == "every_step":
            x = body.norm(x, "model.norm")
        return self.shape.stepped(body, entered, x), _stacked(body, new)

    def _loop(self, prelude: str) -> tuple[str, Pair, list[Pair]]:
        """Append the loop and `exit_step`.

        Returns what the head reads, new keys and values of R steps, (R, layers, L, K·H) each, and
        the coda's.
        """
        graph, shape = self.graph, self.shape
        prepared, body = shape.prepared(graph, prelude), graph.inner("step")
        hidden, new = self._step(body, "step.state", prepared)
        start, end = shape.start(graph, prelude), shape.advance(body, hidden, prepared)
        carried = [Carried("step.state", FLOAT, [1, "length", shape.dim], start, end)]
        scans: dict[str, list[int | str]] = dict.fromkeys(new, self._rows(self.per_step))
        if not shape.exit_gate:
            going = body.add("Identity", "step.going")
            if end != hidden:
                carried.append(Carried("step.hidden", FLOAT, carried[0].dims, start, hidden))
            *_, hidden, keys, values = graph.loop(body, "steps", going, carried, scans)
            graph.many("Identity", "steps", outputs=["exit_step"])
            token, coda = self._token(graph, hidden)
            return token, (keys, values), coda
        token, coda = self._token(body, hidden)
        if coda:
            scans |= dict.fromkeys(_stacked(body, coda), self._rows(len(coda)))
        going, more = self._exit(body, token)
        _, token, _, _, left, *new = graph.loop(body, "steps", going, [*carried, *more], scans)
        graph.many("Squeeze", left, outputs=["exit_step"])
        # Steps that did not run have the keys of the last one that did.
        one = graph.constant(1)
        step_R = graph.add("Range", graph.constant(0), "steps", one)
        step_R = graph.add("Min", step_R, graph.add("Sub", graph.size(new[0], 0), one))
        keys, values = (graph.add("Gather", each, step_R) for each in new[:2])
        latest = [graph.add("Gather", each, graph.constant(-1)) for each in new[2:]]
        return token, (keys, values), [(latest[0], latest[1])] if latest else []

    def _exit(self, body: Graph, token: str) -> tuple[str, list[Carried]]:
        """Return whether the loop goes on, and what is carried from step to step to know it.

        The last token leaves after the first step r with log S_r ≤ log (1 − q), as in
        `reaches_threshold` (`titan_loop/objectives/exit_distribution.py`).
        """
        graph = self.graph
        several = graph.add("Greater", self.length, graph.constant([1]))
        first = graph.add("Equal", self.past, graph.constant([0]))
        is_prompt = graph.add("Or", several, first)
        limit = graph.add("Log", graph.add("Sub", graph.constant(1.0), "threshold"))
        gate_D = body.weight(f"{GATE}.weight", body.read(f"{GATE}.weight")[0])
        bias = body.weight(f"{GATE}.bias", body.read(f"{GATE}.bias"))
        logit = body.add("Add", body.add("MatMul", token, gate_D), bias)
        survival = body.add("Sub", "step.survival", body.add("Softplus", logit))
        read = body.add("Where", "step.inside", token, "step.read")
        left = body.add("Add", "step.left", body.add("Cast", "step.inside", to=INT64))
        inside = body.add("And", "step.inside", body.add("Greater", survival, limit))
        going = body.add("Squeeze", body.add("Or", inside, is_prompt))
        nothing = graph.weight("nothing", np.zeros((1, self.shape.dim), np.float32))
        certain = graph.weight("certain", np.zeros(1, np.float32))
        present = graph.weight("inside", np.ones(1, np.bool_))
        return going, [
            Carried("step.read", FLOAT, [1, self.shape.dim], nothing, read),
            Carried("step.survival", FLOAT, [1], certain, survival),
            Carried("step.inside", BOOL, [1], present, inside),
            Carried("step.left", INT64, [1], graph.constant([0]), left),
        ]

    def _rows(self, layers: int) -> list[int | str]:
        return [layers, "length", self.shape.n_kv_heads * self.shape.head_dim]

    def _by_slot(self, outside: list[str], looped: str) -> str:
        """Return new keys or values of all slots, (slots, 1, K, L, H)."""
        graph, shape = self.graph, self.shape
        width = graph.constant([shape.n_kv_heads * shape.head_dim])
        rows = graph.add("Concat", graph.constant([-1]), self.length, width, axis=0)
        whole = graph.add("Concat", *outside, graph.add("Reshape", looped, rows), axis=0)
        heads = graph.constant([0, 0, shape.n_kv_heads, shape.head_dim])
        by_head = graph.add("Transpose", graph.add("Reshape", whole, heads), perm=[0, 2, 1, 3])
        return graph.add("Unsqueeze", by_head, graph.constant([1]))

    def _append(self, new: list[str]) -> None:
        """Append the new tokens to a past that has R steps, or gets them first."""
        same, other = (self.graph.inner(name) for name in ("same", "other"))
        step_R = other.add("Range", other.constant(0), "steps", other.constant(1))
        row_R = other.add(
            "Mul", other.add("Min", step_R, self.deepest), other.constant(self.per_step)
        )
        row_R1 = other.add("Unsqueeze", row_R, other.constant([1]))
        slots = np.arange(self.outside + self.per_step)
        place = other.add("Add", row_R1, other.weight("looped", slots[self.outside :]))
        place = other.add("Reshape", place, other.constant([-1]))
        place = other.add("Concat", other.weight("outside", slots[: self.outside]), place, axis=0)
        branches = []
        for branch in (same, other):
            whole = [
                branch.add("Gather", name, place) if branch is other else name for name in _PAST
            ]
            parts = zip(whole, new, strict=True)
            joined = [branch.add("Concat", *pair, axis=3) for pair in parts]
            dims = self._dims("present_slots", "present")
            branches.append(branch.proto([], [value(name, FLOAT, dims) for name in joined]))
        is_same = self.graph.add("Equal", self.stored, "steps")
        self.graph.many(
            "If", is_same, outputs=_PRESENT, then_branch=branches[0], else_branch=branches[1]
        )


def _stacked(graph: Graph, pairs: list[Pair]) -> Pair:
    keys, values = (graph.add("Concat", *side, axis=0) for side in zip(*pairs, strict=True))
    return keys, values
