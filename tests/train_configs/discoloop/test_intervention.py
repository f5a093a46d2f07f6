"""The training-free intervention against the equations, question by question."""

import pytest
import torch
from torch import Tensor

from tests.evaluation.task_run import TASK, random_model
from tests.families.rooms import families
from titan_loop.evaluation.exam import Exam
from titan_loop.evaluation.readings import depth_readings
from titan_loop.evaluation.window_scores import at_readings, sum_windows
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from train_configs.discoloop.bridge import intervention

STEPS, COUNT, STRATUM = 3, 40, "3_hops"
MODELS = {
    **{
        name: options
        for name, options in families("analyse", "generate").items()
        if name != "ponder"
    },
    "readout": OuroOptions(norm_placement="readout"),
    "readout by step": OuroOptions(readout_rank=2),
}
"""Those whose steps start from the state; a PonderLM's start from a sum."""


def by_step(model: LoopDecoder, read: Tensor, step: int) -> Tensor:
    """Apply the step's own readout, if the model has one."""
    own = getattr(model, "step_readout", None)
    return read if own is None else own(read, step=step)


def says(model: LoopDecoder, tokens: Tensor, strength: float) -> int:
    """Return the answer to a question; its first hop is at position 1."""
    context = model.make_context(tokens)
    state = model.tok_embeddings(tokens)
    for step in range(1, STEPS + 1):
        if step > 1:
            state = model.advance(state, state, step - 1, context)
        for layer in model.layers.values():
            state = layer(state, context)
        read = model.norm(state)
        if model.norm_placement == "every_step":
            state = read
        read = by_step(model, read, step)
        if step == 1:
            table = model.tok_embeddings.weight
            token = table[int((read[0, 1] @ model.lm_head.weight.T).argmax())]
            token = token / token.square().mean().sqrt()
            state = state.clone()
            state[0, 1] = (1 - strength) * state[0, 1] + strength * token
            read = model.norm(state)
    last = read if model.norm_placement == "readout" else by_step(model, state, STEPS)
    return int((last[0, -1] @ model.lm_head.weight.T).argmax())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_accuracy_is_that_of_every_question_alone(name):
    model = random_model(MODELS[name])
    strengths = [0.0, 0.4, 1.0]
    found = intervention(model, TASK, STRATUM, strengths=strengths, steps=STEPS, count=COUNT)
    wanted = torch.zeros(len(strengths))
    for question in TASK.held_out_questions(COUNT, TASK.strata[STRATUM]):
        *prompt, answer = TASK.encode(question).tokens.tolist()
        for index, strength in enumerate(strengths):
            wanted[index] += says(model, torch.tensor([prompt]), strength) == answer
    assert found == pytest.approx((wanted / COUNT).tolist())
    exam = Exam(TASK, COUNT, vocab_size=TASK.vocab_size, room=16, strata=[STRATUM])
    (windows,) = exam.windows.values()
    right, _ = sum_windows(
        windows,
        at_readings(model, depth_readings([STEPS]), value="right_PT"),
        device=torch.device("cpu"),
    )
    assert found[0] == right.mean()
