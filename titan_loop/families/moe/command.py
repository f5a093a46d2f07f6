"""`titan-loop moe MODEL --output RUN …`: experts for a dense model, a loop for a mixture."""

import sys
from pathlib import Path
from typing import Literal

from titan_loop.families.moe.upcycling import MoEUpcycling, upcycle_to_experts
from titan_loop.runs.conversion import how_to_train


def moe(
    model: Path,
    *,
    output: Path,
    experts: int | None = None,
    top_k: int | None = None,
    router: Literal["sigmoid", "softmax"] | None = None,
    noise: float | None = None,
    dense_layers: list[int] | None = None,
    prelude: int | None = None,
    coda: int | None = None,
    recurrent_steps: int | None = None,
    routers: int | None = None,
) -> None:
    """Give a dense model experts, or loop the layers of a mixture, in a new run directory.

    A model that loops keeps its loop; --recurrent-steps makes one of a model that does not. See
    titan_loop/families/moe/README.md.

    Args:
        model: A run of family nanbeige or moe, or a checkpoint of one; `titan-loop convert import`
            makes one of a LlamaForCausalLM folder.
        output: New run directory.
        experts: Copies of each feed-forward; a dense model needs them.
        top_k: Experts that a token visits, 2 by default.
        router: Function from logits to scores, sigmoid by default.
        noise: Standard deviation of the noise on a copy, relative to the root mean square of its
            matrix; by default none, so that the first outputs are the dense model's.
        dense_layers: Layers that stay dense, counted from 1.
        prelude: Number of layers before the new loop, 0 by default.
        coda: Number of layers after it, 0 by default.
        recurrent_steps: R of the new loop.
        routers: Number of routers of a looped layer; step r uses router r, later steps the last.
    """
    upcycling = MoEUpcycling(
        experts=experts,
        top_k=top_k,
        router=router,
        noise=noise,
        dense_layers=None if dense_layers is None else tuple(dense_layers),
        prelude=prelude,
        coda=coda,
        recurrent_steps=recurrent_steps,
        routers=routers,
    )
    print(upcycle_to_experts(model, output, upcycling, sys.argv))
    print(how_to_train(output))
