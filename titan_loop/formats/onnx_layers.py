"""Layers of dense models as nodes of an ONNX graph."""

from titan_loop.formats.dense import NORMS
from titan_loop.formats.onnx_graph import FLOAT, Graph
from titan_loop.formats.onnx_shape import OnnxShape


class Layers:
    """Layers, (1, L, D) in and out, and what all their visits share.

    Args:
        graph: Graph in which rotations and masks are computed, once a call.
        length: L, the number of new tokens, (1,).
        past: S, the number of earlier tokens, (1,).
    """

    def __init__(self, graph: Graph, shape: OnnxShape, length: str, past: str) -> None:
        self.shape = shape
        zero, one = graph.constant(0), graph.constant(1)
        end = graph.add("Squeeze", graph.add("Add", past, length))
        key_S = graph.add("Range", zero, end, one)
        position_L = graph.add("Range", graph.add("Squeeze", past), end, one)
        position_L1 = graph.add("Unsqueeze", position_L, graph.constant([1]))
        self._masks = [graph.add("GreaterOrEqual", position_L1, key_S)]
        if (window := shape.block["window"]) is not None:
            distance_LS = graph.add("Sub", position_L1, key_S)
            near = graph.add("Less", distance_LS, graph.constant(window))
            self._masks.append(graph.add("And", self._masks[0], near))
        position_L1 = graph.add("Cast", position_L1, to=FLOAT)
        self._tables: list[tuple[str, str]] = []
        for index, rotation in enumerate(shape.rotations()):
            # Not a table: a long window's would be larger than a layer.
            frequency_11F = rotation.frequencies().numpy()[None, None]
            angle = graph.add("Mul", position_L1, graph.weight(f"frequency.{index}", frequency_11F))
            cosine, sine = (graph.add(kind, angle) for kind in ("Cos", "Sin"))
            factor = rotation.attention_factor
            self._tables.append((graph.scaled(cosine, factor), graph.scaled(sine, factor)))

    def visit(
        self, graph: Graph, index: int, x: str, past: tuple[str, str]
    ) -> tuple[str, str, str]:
        """Apply a layer; return its output, and keys and values of the new tokens, (1, L, K·H).

        `past` are keys and values of earlier tokens, (1, K, S, H).
        """
        shape, layer = self.shape, f"model.layers.{index}"
        norms = {own: name for name, own in NORMS[shape.block["norm_order"]].items()}
        factor = shape.layer_factor(index)

        def normed(x: str, place: str) -> str:
            return graph.norm(x, f"{layer}.{norms[place]}") if place in norms else x

        attended, *new = self._attention(graph, index, normed(x, "attention_norm"), past)
        attended = normed(attended, "attention_post_norm")
        x = graph.add("Add", x, graph.scaled(attended, factor))
        fed = self._feed_forward(graph, f"{layer}.mlp", normed(x, "ffn_norm"))
        x = graph.add("Add", x, graph.scaled(normed(fed, "ffn_post_norm"), factor))
        return x, new[0], new[1]

    def _attention(
        self, graph: Graph, index: int, x: str, past: tuple[str, str]
    ) -> tuple[str, str, str]:
        shape, block = self.shape, self.shape.block
        stem = f"model.layers.{index}.self_attn"
        windowed = index in block["windowed_layers"]
        kind = -1 if windowed else 0
        projected = graph.linear(x, *(f"{stem}.{name}_proj" for name in "qkv"))
        heads = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        sizes = graph.constant([each * shape.head_dim for each in heads])
        query, key, new = graph.many("Split", projected, sizes, outputs=3, axis=-1)

        def turned(x: str, name: str, heads: int) -> str:
            if block["qk_norm"] == "head":
                x = graph.add("Reshape", x, graph.constant([1, -1, heads, shape.head_dim]))
            if block["qk_norm"] != "none":
                x = graph.norm(x, f"{stem}.{name}_norm")
            if block["qk_norm"] == "head":
                x = graph.add("Reshape", x, graph.constant([1, -1, heads * shape.head_dim]))
            if index in block["unrotated_layers"]:
                return x
            part = 0 if shape.rotary_dim == shape.head_dim else shape.rotary_dim
            return graph.add(
                "RotaryEmbedding",
                x,
                *self._tables[kind],
                num_heads=heads,
                rotary_embedding_dim=part,
            )

        query, key = turned(query, "q", shape.n_heads), turned(key, "k", shape.n_kv_heads)
        # The mask alone says what is causal: with a past, engines read `is_causal` differently.
        attended, _, _ = graph.many(
            "Attention",
            *(query, key, new, self._masks[kind], *past),
            outputs=3,
            q_num_heads=shape.n_heads,
            kv_num_heads=shape.n_kv_heads,
            scale=block["attention_scale"] or shape.head_dim**-0.5,
            softcap=float(block["attention_softcap"]),
        )
        return graph.linear(attended, f"{stem}.o_proj"), key, new

    def _feed_forward(self, graph: Graph, stem: str, x: str) -> str:
        gate, up = (graph.linear(x, f"{stem}.{name}_proj") for name in ("gate", "up"))
        if self.shape.block["activation"] == "gelu":
            gate = graph.add("Gelu", gate, approximate="tanh")
        else:
            gate = graph.add("Mul", gate, graph.add("Sigmoid", gate))
        return graph.linear(graph.add("Mul", gate, up), f"{stem}.down_proj")
