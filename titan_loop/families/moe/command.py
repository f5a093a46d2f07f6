"""`titan-loop moe MODEL --output RUN --experts E …`: experts for a dense model."""

import sys
from pathlib import Path
from typing import Literal

from titan_loop.families.moe.upcycling import MoEUpcycling, upcycle_to_experts
from titan_loop.runs.conversion import how_to_train


def moe(
    model: Path,
    *,
    output: Path,
    experts: int,
    top_k: int = 2,
    router: Literal["sigmoid", "softmax"] = "sigmoid",
    noise: float = 0.0,
    dense_layers: tuple[int, ...] = (),
    routers: int = 1,
) -> None:
    """Give a dense model experts, in a new run directory.

    A model that loops keeps its loop; `titan-loop retrofit --mode plain` makes one of a model that
    does not. See titan_loop/families/moe/README.md.

    Args:
        model: A run of family nanbeige, or a checkpoint of one; `titan-loop convert import` makes
            one of a LlamaForCausalLM folder.
        output: New run directory.
        experts: Copies of each feed-forward.
        top_k: Experts that a token visits.
        router: Function from logits to scores.
        noise: Standard deviation of the noise on a copy, relative to the root mean square of its
            matrix; by default none, so that the first outputs are the dense model's.
        dense_layers: Layers that stay dense, counted from 1.
        routers: Number of routers of a looped layer; step r uses router r, later steps the last.
    """
    upcycling = MoEUpcycling(
        experts=experts,
        top_k=top_k,
        router=router,
        noise=noise,
        dense_layers=dense_layers,
        routers=routers,
    )
    print(upcycle_to_experts(model, output, upcycling, sys.argv))
    print(how_to_train(output))
