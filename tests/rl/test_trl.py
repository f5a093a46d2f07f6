"""Objectives of rewards against TRL's own loss on the same tensors."""

from unittest.mock import MagicMock

import pytest
import torch

from titan_loop.rl.objectives import clipped_loss, group_advantages, token_weights

PROMPTS, ANSWERS, LONGEST = 3, 4, 7


@pytest.mark.hf5
@pytest.mark.parametrize(("normaliser", "kind"), [("sequence", "grpo"), ("batch", "dapo")])
def test_the_loss_is_trls(normaliser, kind):
    trl = pytest.importorskip("trl", reason="see tools/test_hf.sh")
    torch.manual_seed(0)
    rows = PROMPTS * ANSWERS
    length_PG = torch.randint(1, LONGEST + 1, (PROMPTS, ANSWERS))
    mask = (torch.arange(LONGEST) < length_PG.view(-1, 1)).int()
    old = -torch.rand(rows, LONGEST).double() * 3
    log_prob = (old + torch.randn(rows, LONGEST) * 0.3).requires_grad_()  # some are clipped
    reward_PG = torch.randint(0, 3, (PROMPTS, ANSWERS)).double()
    advantage_PG = group_advantages(reward_PG, length_PG > 0)

    weight = token_weights(length_PG, normaliser).view(-1, 1) * mask
    token = clipped_loss(log_prob, old, advantage_PG.view(-1, 1), clip_low=0.2, clip_high=0.28)
    ours = (weight * token).sum()
    gradient = torch.autograd.grad(ours, log_prob)[0]

    trainer = MagicMock(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    trainer.model.training, trainer.args.delta = False, None
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather.side_effect = lambda value: value
    trainer._get_per_token_logps_and_entropies.return_value = (
        log_prob,
        torch.zeros(rows, LONGEST),
        None,
    )
    ids = torch.zeros(rows, 2).long()
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids + 1,
        "completion_ids": torch.zeros(rows, LONGEST).long(),
        "completion_mask": mask,
        "advantages": advantage_PG.flatten(),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    theirs = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, log_prob)[0])
