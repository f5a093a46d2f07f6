"""A run on a generated task whose checkpoint was written without training."""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from titan_loop.checkpoint.tensors import write_checkpoint
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.permutation_hops import PermutationHops
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder
from titan_loop.runs.run_directory import RunDirectory

TASK = PermutationHops(entities=12, relations=6, hops=3, asked_hops=5, trained_questions=300)
WINDOW = TASK.longest_example - 1


def random_model(options: ModelOptions) -> LoopDecoder:
    """A model of the task off its initial point, in float64."""
    torch.manual_seed(0)
    model = build_decoder(replace(options, vocab_size=TASK.vocab_size), max_seq_len=WINDOW)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


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
                "architecture": model.config.architecture(),
            },
            "data": loader.state_dict(),
            "lineage": {},
        },
    )
    return path
