"""A run on a generated task whose checkpoint was written without training."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from tests.evaluation.hops_task import Hops
from tests.families.rooms import families
from titan_loop.checkpoint.tensors import write_checkpoint
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder
from titan_loop.runs.run_directory import RunDirectory

TASK = Hops()
WINDOW = TASK.longest_example - 1

MODELS: dict[str, ModelOptions] = {
    "outside": OuroOptions(n_layers=4, prelude_layers=1, coda_layers=1, norm_placement="readout"),
    **families("analyse", "generate"),
}
"""What analyses of states are tested on: every family that reads plain tokens, and a model with
layers outside the loop."""


def random_model(options: ModelOptions) -> LoopDecoder:
    """A model of the task off its initial point, in float64."""
    torch.manual_seed(0)
    model = build_decoder(replace(options, vocab_size=TASK.vocab_size), max_seq_len=WINDOW)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def walk(
    model: LoopDecoder,
    tokens: Tensor,
    steps: int,
    visited: Callable[[tuple[int, int], Tensor], Tensor],
) -> Tensor:
    """Return what the head reads after a pass written out layer by layer.

    Args:
        model: From `random_model`.
        tokens: (B, L).
        steps: R.
        visited: Takes a visit (step, looped layer), of the embedding (0, 0), and the state there;
            returns the state to go on with.
    """
    context, layers = model.make_context(tokens), [*model.layers.values()]
    looped, normed = model.config.looped, model.norm_placement == "every_step"
    carry = visited((0, 0), model.tok_embeddings(tokens))
    for layer in layers[: looped.start]:
        carry = layer(carry, context)
    for step in range(1, steps + 1):
        state = carry
        for number, index in enumerate(looped, start=1):
            state = visited((step, number), layers[index](state, context))
        state = model.norm(state) if normed else state
        carry = model.advance(carry, state, step, context)
    for layer in layers[looped.stop :]:
        state = layer(state, context)
    return state if normed and looped.stop == len(layers) else model.norm(state)


def write_task_run(path: Path, options: ModelOptions, *, step: int = 3) -> Path:
    """Write a run directory with one checkpoint."""
    run, model = RunDirectory(path), random_model(options).float()
    recorded = asdict(replace(options, vocab_size=TASK.vocab_size))
    run.create_or_open(
        ["test"],
        config={
            "model": recorded,
            "training": {"seq_len": WINDOW},
            "checkpoint": {"folder": "checkpoints"},
            "total_tokens": 900,
        },
    )
    loader = TaskLoader.Config(task=TASK).build(
        dp_world_size=1, dp_rank=0, seq_len=WINDOW, local_batch_size=1
    )
    write_checkpoint(
        run.checkpoint(step),
        model.state_dict(),
        {
            "step": step,
            "trainer": {
                "step": step,
                "tokens": 300,
                "recurrent_steps": 3,
                "architecture": model.config.architecture,
            },
            "data": loader.state_dict(),
            "lineage": {},
        },
    )
    return path
