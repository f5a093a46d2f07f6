"""Reinforcement learning on the depth that the model chooses itself.

    prompts.py     question ─► prompt, reference answer
    rollouts.py    the engine on the weights in training ─► G answers, the exit step of each token
                   ─► rewards, advantages ─► windows with columns
    replay         `titan_loop/models/replay.py`: the training pass sees the engine's keys
    reward_loss.py log π of each token at the step where it left ─► objectives.py ─► gradients

A stage of this kind is a run like any other: `RolloutLoader` is its data and `RewardLoss` its
objective.
"""
