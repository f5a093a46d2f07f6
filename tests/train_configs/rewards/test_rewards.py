"""Written results, and the loss up to an exit that is found after the answer."""

from itertools import islice

import pytest
import torch

from tests.inference.reference import make_model
from titan_loop.cli.main import main
from titan_loop.models.replay import EXIT_STEP
from titan_loop.objectives.streamed_loss import LossBatch
from titan_loop.rl.reward_loss import ADVANTAGE, READ_STEP, WEIGHT, RewardLoss
from train_configs.rewards.answers import answers
from train_configs.rewards.cumulative_loss import CumulativeLoss
from train_configs.rewards.written_arithmetic import WrittenArithmetic


@pytest.mark.parametrize(("operations", "written"), [(6, 3), (5, 3), (2, 1), (1, 1)])
def test_a_result_is_written_after_every_two_operations_and_the_last(operations, written):
    task = WrittenArithmetic(modulus=5, max_operations=6)
    zero = 2 + 3  # after <bos>, <ans> and the operators
    asked = (q for q in task.questions(0) if q.operations == operations)
    for question in islice(asked, 50):
        example = task.encode(question)
        values = [value - zero for value in example.labels[example.answer].tolist()]
        text, *rest = map(str, question.expression)
        right = []
        for operator, operand in zip(rest[::2], rest[1::2], strict=True):
            text = f"({text} {operator} {operand})"
            right.append(eval(text) % 5)
        assert values == [*right[1:-1:2], right[-1]]
        assert len(values) == written
        assert len(example.tokens) <= task.longest_example


def test_hard_questions_alone_are_asked_where_the_fewest_operations_are_the_most():
    task = WrittenArithmetic(modulus=5, max_operations=6, fewest_operations=6)
    assert {q.operations for q in islice(task.questions(0), 50)} == {6}
    assert task.longest_example == len(task.encode(next(task.questions(0))).tokens)


def test_the_loss_is_cumulative_up_to_the_exit_found_afterwards():
    model = make_model(vocab_size=3).double()
    inputs, labels = torch.tensor([[2, 0, 1, 1]]), torch.tensor([[-100, -100, 1, 2]])
    advantage = torch.tensor([[0.0, 0.0, 1.5, -0.5]]).double()
    steps = 3
    unread = dict.fromkeys(RewardLoss.Config.columns, torch.full_like(advantage, torch.nan))
    columns = unread | {
        READ_STEP: torch.full_like(inputs, steps),
        ADVANTAGE: advantage,
        WEIGHT: torch.full_like(advantage, 0.5),
    }

    def states():
        full = {EXIT_STEP: torch.full_like(inputs, steps)}
        return model(inputs, recurrent_steps=steps, columns=full)

    output = states()
    survival_RL = (1 - torch.stack(output.exit_logit_RBL)[:, 0].sigmoid()).cumprod(dim=0)
    threshold = 1 - survival_RL[1, 2].item()  # the third token leaves after step 2
    objective = CumulativeLoss(CumulativeLoss.Config(threshold=threshold))
    objective.compute(model.lm_head, output, LossBatch(labels, 1.0, columns))[0].backward()
    found = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    output = states()
    expected = torch.zeros(()).double()
    for place, label in ((2, 1), (3, 2)):
        for r, state_BLD in enumerate(output.hidden_RBLD):
            expected -= (
                (r == 0 or 1 - survival_RL[r - 1, place] < threshold)
                * 0.5
                * advantage[0, place]
                * model.lm_head(state_BLD)[0, place].log_softmax(-1)[label]
            )
    expected.backward()
    right = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, right)


@pytest.mark.usefixtures("alone")
def test_an_arm_starts_from_its_parent_and_its_answers_have_room(tmp_path, monkeypatch):
    words = ["train", "rewards", "--dump-folder", str(tmp_path), "--training.steps", "1"]
    assert main([*words, "--stage", "parent", "--suite.interval", "0"]) == 0
    parent = ["--checkpoint.carry.parent", str(tmp_path / "parent")]
    few = ["--training.local-batch-size", "8", "--batch.global-batch-tokens", "144"]
    assert main([*words, "--stage", "priced", *parent, *few]) == 0
    monkeypatch.setattr(WrittenArithmetic, "grade", lambda self, question, answer: len(answer) == 3)
    found = answers(tmp_path / "priced", exits=("sampled",), questions=4, samples=2).results
    for name in ("greedy", "sampled", "any_right"):
        assert found[f"written_arithmetic/{name}/sampled"] == 1
    spent = [found[f"written_arithmetic/{name}_flops/training"] for name in ("rollout", "update")]
    assert 0 < spent[0] < spent[1]
