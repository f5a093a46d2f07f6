"""Corrupts values before a step of a latent-space model, and counts graphs that the step repairs.

    told state before step t+1 ─► some values of depth t replaced ─► one step ─► right again?

As in training with `model.corrupted=told`, values that were worked out in the step before are
replaced, each with the same probability. Unlike there, at least one is, and always by another
number.

Source: arXiv 2510.14095, section 4.1 (mechanism 4) and Appendix B.4.
"""

import random

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch

from titan_loop.evaluation.exam import example_windows
from titan_loop.families.latent.model import LatentDecoder

from .task import DagArithmetic

_BATCH = 32


@torch.no_grad()
def share_repaired(
    model: LatentDecoder,
    task: DagArithmetic,
    stratum: str,
    *,
    count: int,
    share: float = 0.5,
    seed: int = 0,
) -> float:
    """Return the share of held-out graphs whose corrupted values are all right after one step.

    Args:
        model: Model in evaluation mode, not sharded.
        task: Its training task.
        stratum: Stratum of the graphs.
        count: Number of graphs; each is corrupted at one random step up to its depth.
        share: Probability that a value is replaced by another one.
        seed: Seed that chooses the steps and the values.
    """
    questions = task.held_out_questions(count, task.strata[stratum])
    examples = [task.encode(question) for question in questions]
    windows = example_windows(stratum, examples, task.columns, room=model.config.max_seq_len)
    generator = random.Random(seed)
    depth_WL, solved_WL = windows.columns["depth"], windows.columns["solved"]
    steps = [1 + int(generator.random() * task.depth(question)) for question in questions]
    step_W1 = torch.tensor(steps).unsqueeze(1)
    told_WL = torch.where(depth_WL <= step_W1, solved_WL, task.empty)
    hit_WL = torch.zeros_like(depth_WL, dtype=torch.bool)
    for row, step in enumerate(steps):
        new = (depth_WL[row] == step).nonzero().flatten().tolist()
        chosen = [at for at in new if generator.random() < share] or [generator.choice(new)]
        for at in chosen:
            other = 1 + int(generator.random() * (task.modulus - 1))
            told_WL[row, at] = (solved_WL[row, at] + other) % task.modulus
            hit_WL[row, at] = True
    right: list[bool] = []
    for rows in torch.arange(count).split(_BATCH):
        factors = windows.columns["factors"][rows]
        states = model(
            told_WL[rows],
            windows.positions[rows],
            recurrent_steps=1,
            columns={"factors": factors},
        ).hidden_RBLD
        said_BL = model.lm_head(states[0]).argmax(dim=-1)
        right += ((said_BL == solved_WL[rows]) | ~hit_WL[rows]).all(dim=1).tolist()
    return sum(right) / count
