"""Converts a model both ways in a process of its own and prints how far its memory grew, as JSON.

    python memory_driver.py FOLDER TOKENIZER MAX_SHARD_GIGABYTES

The checkpoint is made tensor by tensor, too, so that nothing here ever held the whole model. Memory
is the most that was resident, minus what was before the first conversion; where the kernel cannot
reset a peak that errs upwards.
"""

import gc
import json
import sys
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path

import torch

from titan_loop import compat
from titan_loop.checkpoint.tensors import LazyTensor, write_checkpoint
from titan_loop.cli import main as cli
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder
from titan_loop.runs.run_directory import RunDirectory


def write_run(run: RunDirectory, options: OuroOptions) -> int:
    """Write a run whose weights are drawn one by one; return their bytes."""
    model = build_decoder(options, max_seq_len=8, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config = {
        "model": asdict(options),
        "training": {"seq_len": 8},
        "dataloader": {"mixture": []},
        "checkpoint": {"folder": "checkpoints"},
    }
    run.create_or_open(["test"], config=config)
    trainer = {
        "step": 1,
        "tokens": 1,
        "recurrent_steps": model.recurrent_steps,
        "architecture": model.config.architecture,
    }
    write_checkpoint(
        run.checkpoint(1),
        {
            name: LazyTensor(shape, torch.float32, partial(torch.randn, shape))
            for name, shape in shapes.items()
        },
        {"step": 1, "trainer": trainer, "data": {}, "lineage": {}},
    )
    return 4 * sum(map(prod, shapes.values()))


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def main() -> None:
    folder, tokenizer, max_shard_gigabytes = Path(sys.argv[1]), *sys.argv[2:]
    shard = ("--max-shard-gigabytes", max_shard_gigabytes)

    def convert(options: OuroOptions, name: str) -> int:
        """Write a run, export it in bf16 and to GGUF, import it in fp32; return its bytes."""
        run = RunDirectory(folder / name)
        weights = write_run(run, options)
        output = folder / f"{name}-exported"
        flags = ["--output", output, "--tokenizer", tokenizer, "--dtype", "bfloat16"]
        assert cli.main(["convert", "export", *map(str, [run.path, *flags]), *shard]) == 0
        back = folder / f"{name}-back"
        file = ["--to", "gguf", "--dtype", "q8_0", "--no-tokenizer", "--output", f"{output}.gguf"]
        assert cli.main(["convert", "export", str(run.path), *file]) == 0
        assert cli.main(["convert", "import", str(output), "--output", str(back)]) == 0
        return weights

    vocabulary = 300
    convert(OuroOptions(vocab_size=vocabulary), "small")  # imports everything, warms the allocator
    gc.collect()
    compat.CpuDevice().reset_peak_memory_stats()
    before = resident_bytes()
    large = OuroOptions(
        vocab_size=vocabulary, dim=512, n_heads=8, n_kv_heads=8, hidden_dim=2048, n_layers=10
    )
    weights = convert(large, "large")
    print(json.dumps({"weights": weights, "growth": compat.peak_resident_bytes() - before}))


if __name__ == "__main__":
    main()
