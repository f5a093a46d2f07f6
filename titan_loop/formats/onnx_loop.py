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
from titan_loop.formats.onnx_graph import FLOAT, INT64, Carried, Graph, value
from titan_loop.formats.onnx_layers import Layers
from titan_loop.formats.onnx_shape import GATE, OnnxShape

_PAST = ("past_keys", "past_values")
_PRESENT = ("present_keys", "present_values")


class LoopGraph:
    """The graph of a model."""

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
        factor = shape.dim**0.5 if shape.scale_embeddings else shape.block["embedding_scale"]
        x = graph.scaled(self._embedded(), factor)
        x, prelude = self._outside(graph, 0, x)
        token, looped, coda = self._loop(x)
        self._append(self._by_slot([*prelude, *coda], looped))
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

    def _slot(self, graph: Graph, slot: str) -> tuple[str, str]:
        keys, values = (graph.add("Gather", name, slot) for name in _PAST)
        return keys, values

    def _outside(self, graph: Graph, side: int, x: str) -> tuple[str, list[str]]:
        """Apply the layers before (0) or after (1) the loop."""
        new: list[str] = []
        for slot, index in enumerate(self.shape.outside[side], side * self.shape.prelude_layers):
            past = self._slot(graph, graph.constant(slot))
            x, *pair = self.layers.visit(graph, index, x, past)
            new += pair
        return x, new

    def _token(self, graph: Graph, x: str) -> tuple[str, list[str]]:
        """Return what head and gate read of the last token, (1, D), and the coda's new keys."""
        x, coda = self._outside(graph, 1, x)
        token = graph.add("Gather", x, graph.constant(-1), axis=1)
        if coda or self.shape.norm_placement == "readout":
            token = graph.norm(token, "model.norm")
        return token, coda

    def _step(self, body: Graph, state: str, prepared: str) -> tuple[str, str]:
        """Return the state after a step, and the step's new keys and values."""
        entered = x = self.shape.input(body, state, prepared)
        row = body.add("Min", f"{body.prefix}step", self.deepest)
        row = body.add("Mul", row, body.constant(self.per_step))
        new: list[str] = []
        for slot, index in enumerate(self.shape.looped, self.outside):
            place = body.add("Add", row, body.constant(slot)) if slot else row
            past = self._slot(body, place)
            x, *pair = self.layers.visit(body, index, x, past)
            new += pair
        if self.shape.norm_placement == "every_step":
            x = body.norm(x, "model.norm")
        return self.shape.stepped(body, entered, x), body.add("Concat", *new, axis=0)

    def _loop(self, prelude: str) -> tuple[str, str, list[str]]:
        """Append the loop and `exit_step`.

        Returns what the head reads, new keys and values of R steps, (R, 2·layers, L, K·H), and the
        coda's.
        """
        graph, shape = self.graph, self.shape
        prepared, body = shape.prepared(graph, prelude), graph.inner("step")
        hidden, new = self._step(body, "step.state", prepared)
        start, end = shape.start(graph, prelude), shape.advance(body, hidden, prepared)
        state = Carried("step.state", FLOAT, [1, "length", shape.dim], start, end)
        width = shape.n_kv_heads * shape.head_dim
        scans = {new: [2 * self.per_step, "length", width]}
        if not shape.exit_gate:
            final = [] if end == hidden else [state._replace(name="step.hidden", end=hidden)]
            going = body.add("Identity", "step.going")
            *_, hidden, new = graph.loop(body, "steps", going, [state, *final], scans)
            graph.many("Identity", "steps", outputs=["exit_step"])
            token, coda = self._token(graph, hidden)
            return token, new, coda
        token, coda = self._token(body, hidden)
        limit, going, survival = self._exit(body, token)
        scans |= {token: [1, shape.dim], survival.end: [1, 1]}
        if coda:
            latest = body.add("Concat", *coda, axis=0)
            scans[latest] = [len(coda), "length", width]
        found = graph.loop(body, "steps", going, [state, survival], scans)
        _, _, new, token_R, survival_R, *of_coda = found
        one, axes = graph.constant(1), graph.constant([0, 1, 2])
        last = graph.add("Sub", graph.size(new, 0), one)
        stays_R = graph.add("Cast", graph.add("Greater", survival_R, limit), to=INT64)
        left = graph.add("Min", graph.add("ReduceSum", stays_R, axes, keepdims=0), last)
        graph.many("Add", left, one, outputs=["exit_step"])
        # Steps that did not run have the keys of the last one that did.
        step_R = graph.add("Range", graph.constant(0), "steps", one)
        new = graph.add("Gather", new, graph.add("Min", step_R, last))
        of_coda = [graph.add("Gather", each, graph.constant(-1)) for each in of_coda]
        return graph.add("Gather", token_R, left), new, of_coda

    def _exit(self, body: Graph, token: str) -> tuple[str, str, Carried]:
        """Return log (1 − q), whether the loop goes on after a step r, and log S_r.

        A token leaves after the first step with log S_r ≤ log (1 − q), as in `reaches_threshold`
        (`titan_loop/objectives/exit_distribution.py`).
        """
        graph = self.graph
        several = graph.add("Greater", self.length, graph.constant([1]))
        first = graph.add("Equal", self.past, graph.constant([0]))
        limit = graph.add("Log", graph.add("Sub", graph.constant(1.0), "threshold"))
        never = graph.constant(float(np.finfo(np.float32).min))  # of a prompt: it runs all steps
        ends = graph.add("Where", graph.add("Or", several, first), never, limit)
        gate = (f"{GATE}.weight", f"{GATE}.bias")
        logit = body.add("Gemm", token, *(body.weight(n, body.read(n)) for n in gate), transB=1)
        survival = body.add("Sub", "step.survival", body.add("Softplus", logit))
        going = body.add("Greater", survival, ends)
        certain = graph.weight("certain", np.zeros((1, 1), np.float32))
        carried = Carried("step.survival", FLOAT, [1, 1], certain, survival)
        return limit, body.add("Squeeze", going), carried

    def _by_slot(self, outside: list[str], looped: str) -> list[str]:
        """Return new keys and new values of all slots, (slots, 1, K, L, H) each."""
        graph, shape = self.graph, self.shape
        heads, width = shape.n_kv_heads, shape.head_dim

        def by_slot(pairs: str) -> str:
            """Return (slots, 2, K, L, H) of (any, 2·any, L, K·H)."""
            pairs = graph.add("Reshape", pairs, graph.constant([0, 0, 0, heads, width]))
            pairs = graph.add("Transpose", pairs, perm=[0, 1, 3, 2, 4])
            return graph.add("Reshape", pairs, graph.constant([-1, 2, heads, 0, width]))

        whole = by_slot(looped)
        if outside:
            stacked = graph.add("Concat", *outside, axis=0)
            stacked = graph.add("Unsqueeze", stacked, graph.constant([0]))
            whole = graph.add("Concat", by_slot(stacked), whole, axis=0)
        return graph.many("Split", whole, outputs=2, axis=1, num_outputs=2)

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
