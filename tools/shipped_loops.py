"""Every run of train_configs/shipped_loops that has no result yet, in one process.

python -m tools.shipped_loops [FLAG...]    flags of `titan-loop train`
"""

import sys
from pathlib import Path

from titan_loop.cli.main import main
from train_configs.shipped_loops.recipes import (
    ARMS,
    RATES,
    SEEDS,
    TASKS,
    TUNING,
    TUNING_SEED,
    chosen,
)

FOLDER = Path("train_configs/shipped_loops/results")


def train(arm: str, stage: str, seed: int, flags: list[str]) -> None:
    """Train, examine and record a run, unless its result is there."""
    results = TUNING if seed == TUNING_SEED else FOLDER
    if (results / "shipped_loops" / f"{stage}-seed{seed}.json").exists():
        return
    folder = f"runs/shipped_loops-seed{seed}"
    command = ["train", "shipped_loops", "--stage", stage, "--dump-folder", folder, *flags]
    commands = [[*command, "--debug.seed", str(seed), "--dataloader.seed", str(seed)]]
    run = f"{folder}/{stage}"
    if seed != TUNING_SEED and "_text_" in stage:  # documents' sums, for the intervals
        depths = str(ARMS[arm].recurrent_steps)
        commands.append(["eval", run, "--windows", "64", "--depths", depths])
    commands.append(["results", "add", run, "--folder", str(results)])
    for each in commands:
        sys.argv = ["titan-loop", *each]  # which the run records as its command
        if status := main(each):
            sys.exit(status)


def every_run(flags: list[str]) -> None:
    """Train all rates on the tuning seed, then each arm's best one on the other seeds."""
    for task in TASKS:
        for arm in ARMS:
            for label in RATES:
                train(arm, f"{arm}_{task}_{label}", TUNING_SEED, flags)
        for seed in SEEDS:
            for arm in ARMS:
                train(arm, chosen(arm, task), seed, flags)


if __name__ == "__main__":
    every_run(sys.argv[1:])
