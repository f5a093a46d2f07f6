"""Step time and memory of a looped mixture beside the same mixture without a loop, at equal FLOPs.

    python tools/bench/looped_moe.py
    python tools/bench/looped_moe.py --dim 1536 --heads 12 --layers 7 --experts 16 \
        --expert-width 2432 --vocab-size 32768 --seq-len 2048 --compile              # a GPU

`loop` has so many layers and visits each R times; `layers` has R times the layers; `flat` is `loop`
with R times the experts, so that only its attention has fewer parameters than `layers`. A token
meets the same matrices in all three, but for rows of the router. States are weights, gradients and
AdamW's moments; the rest of the peak is activations, gathered experts and what kernels work in.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, spread
from training_step import (
    Job,
    build,
    device,
    extra_bytes,
    flops_per_step,
    start,
    step_parser,
    trainer_step,
)

from titan_loop.families.moe.model import MoEOptions
from titan_loop.models.decoder import LoopDecoder

STATE_BYTES = 16  # of a parameter: weight, gradient and two moments in fp32


def main() -> int:
    """Print the table."""
    parser = step_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--expert-width", type=int, default=384)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    options = begin(parser, start=start)
    steps, layers, experts = options.recurrent_steps, options.layers, options.experts
    jobs = {
        f"loop: {layers} layers × R = {steps}, {experts} experts": _job(
            options, layers, steps, experts
        ),
        f"layers: {layers * steps}, {experts} experts": _job(options, layers * steps, 1, experts),
        f"flat: {layers} layers × R = {steps}, {experts * steps} experts": _job(
            options, layers, steps, experts * steps
        ),
    }
    models = [build(job) for job in jobs.values()]
    trained = [_step(job, model) for job, model in zip(jobs.values(), models, strict=True)]
    times = in_turn(trained, pairs=options.pairs, warmup=options.warmup)
    print("model | parameters | step s | over layers | FLOPs over layers | GiB states | GiB beyond")
    whole = list(jobs.values())[1]
    for name, job, model, step, seconds in zip(
        jobs, jobs.values(), models, trained, times, strict=True
    ):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{name} | {parameters:,} | {spread(seconds)} | {spread(ratios(seconds, times[1]))} | "
            f"{flops_per_step(job) / flops_per_step(whole):.4f} | "
            f"{STATE_BYTES * parameters / 2**30:.3f} | {extra_bytes(step, model) / 2**30:.3f}"
        )
    tokens = whole.tokens / statistics.median(times[0])
    print(f"{tokens:,.0f} tokens/s of the loop")
    dist.destroy_process_group()
    return 0


def _job(options: argparse.Namespace, layers: int, steps: int, experts: int) -> Job:
    return Job(
        model=MoEOptions(
            dim=options.dim,
            n_layers=layers,
            n_heads=options.heads,
            n_kv_heads=options.heads,
            hidden_dim=options.expert_width,
            experts=experts,
            top_k=options.top_k,
            vocab_size=options.vocab_size,
            recurrent_steps=steps,
        ),
        seq_len=options.seq_len,
        windows=options.batch,
        compiled=options.compile,
    )


def _step(job: Job, model: LoopDecoder) -> Callable[[], torch.Tensor]:
    """Return a training step that ends as the trainer's does: the biases of the experts move."""
    train, updated = trainer_step(job, model), torch.tensor(True, device=device())

    def step() -> torch.Tensor:
        loss = train()
        model.after_update(None, updated)
        return loss

    return step


if __name__ == "__main__":
    raise SystemExit(main())
