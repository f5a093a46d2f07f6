"""Reinforcement learning on the depth that the model chooses itself.

    rollouts.py    question of a task ─► prompt ─► G answers ─► rewards, advantages ─► windows
    writer.py      the engine on the weights in training: tokens, the exit step and log π of each
    replay         `titan_loop/models/replay.py`: the training pass sees the engine's keys
    reward_loss.py log π of each token at the step where it left ─► objectives.py ─► gradients

A stage of this kind is a run like any other: `RolloutLoader` is its data and `RewardLoss` its
objective.
"""
