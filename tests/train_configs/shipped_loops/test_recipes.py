"""The arms' sizes, and the rates that their results chose."""

from dataclasses import replace

import pytest

from titan_loop.models.family import build_decoder
from train_configs.shipped_loops.recipes import ARMS, BEST, TASKS, chosen

VOCABULARY = 1024


def test_arms_but_dense_have_as_many_parameters():
    sizes = {}
    for arm, options in ARMS.items():
        model = build_decoder(replace(options, vocab_size=VOCABULARY), max_seq_len=8, device="meta")
        idle = "message" if arm == "alone" else "none"
        sizes[arm] = sum(p.numel() for name, p in model.named_parameters() if idle not in name)
    sizes.pop("dense")
    assert [*sizes.values()] == pytest.approx([sizes["loop"]] * 4, rel=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_tables_have_the_best_rate_of_the_tuning_seed(task):
    for arm, labels in BEST.items():
        assert chosen(arm, task) == f"{arm}_{task}_{labels[task]}"
