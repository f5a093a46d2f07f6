"""Share of graphs that are fully solved in the paper's sense: every factor at every position.

Source: arXiv 2510.14095, "% fully solved", as in the authors' code: all four factors agree with the
solved graph at all positions but padding, after one step more than the deepest graph of the set
needs. (An exam grades the values of names alone, after as many steps as each graph needs.)
"""

import torch

from titan_loop.evaluation.exam import example_windows
from titan_loop.families.latent.model import LatentDecoder

from .task import DagArithmetic

_BATCH = 32


@torch.no_grad()
def share_solved(
    model: LatentDecoder, task: DagArithmetic, stratum: str, *, count: int
) -> tuple[float, int]:
    """Return the share of held-out graphs that are fully solved, and the number of steps.

    Args:
        model: Model in evaluation mode, not sharded; trained with a loss on every step.
        task: Its training task.
        stratum: Stratum of the graphs.
        count: Number of graphs: the first that the exam draws, repetitions included.
    """
    questions = task.held_out_questions(count, task.strata[stratum])
    examples = [task.encode(question) for question in questions]
    windows = example_windows(stratum, examples, task.columns, room=model.config.max_seq_len)
    steps = 1 + max(task.depth(question) for question in questions)
    told_WLF = torch.cat(
        (windows.columns["solved"].unsqueeze(-1), windows.columns["factors"]), dim=-1
    )
    position_L = torch.arange(told_WLF.shape[1])
    length_W1 = torch.tensor([len(example.tokens) for example in examples]).unsqueeze(1)
    right: list[bool] = []
    for rows in torch.arange(count).split(_BATCH):
        output = model(
            windows.input[rows],
            windows.positions[rows],
            recurrent_steps=steps,
            collect="last",
            columns={"factors": windows.columns["factors"][rows]},
        )
        logits = model.lm_head(output.hidden_RBLD[-1], factors=True)
        said_BLF = torch.stack([logits_BLV.argmax(dim=-1) for logits_BLV in logits], dim=-1)
        wrong_BL = (said_BLF != told_WLF[rows]).any(dim=-1)
        right += (~(wrong_BL & (position_L < length_W1[rows])).any(dim=1)).tolist()
    return sum(right) / count, steps
