"""What a gate-only training step costs beside a step that trains the whole model.

    python tools/bench/gate_stage.py --size quickstart --recurrent-steps 4

Both models are built from the real trainer's parts on one device, without a loader: forward, loss,
backward, clipping and the AdamW update, on the same random tokens. They step in turn, so both see
the same machine; the ratio is the median over the pairs and its range. Refuses to run beside
another load, and exits with 1 if the ratio is above `--limit`. Runs unchanged on a GPU, where
parameters are bf16 under FSDP.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
import torch
import torch.distributed as dist
from conditions import add_load_flag, machine, require_quiet_machine
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as titan_utils

from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.sharding import set_loop_sharding
from titan_loop.models.sizes import ModelOptions, decoder_config
from titan_loop.models.trainable import Trainable
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.objectives.gate_loss import AdaptiveGateLoss
from titan_loop.training.learning_rate import AdamWConfig


def main() -> int:
    """Measure every R asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.45)
    add_load_flag(parser)
    options = parser.parse_args()
    require_quiet_machine(options)
    compat.start_runtime()
    device = titan_utils.get_local_device()
    titan_utils.device_module.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    print(" ".join(sys.argv), "|", machine(device))
    print(" R | whole model, s | gate only, s | ratio (range)")
    ratios = [_measure(options, steps, device) for steps in options.recurrent_steps]
    dist.destroy_process_group()
    return int(max(ratios) > options.limit)


def _build(
    options: argparse.Namespace, steps: int, device: torch.device, trainable: Trainable
) -> LoopDecoder:
    parallelism = ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
    dist_utils.set_spmd_backend(compat.SPMD_BACKEND)
    size = ModelOptions(size=options.size, attention=options.attention, recurrent_steps=steps)
    config = decoder_config(size, max_seq_len=options.seq_len)
    set_loop_sharding(config, enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    parallelize_loop_decoder(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(
            mixed_precision_param="bfloat16" if device.type == "cuda" else "float32"
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=options.compile, components=["model"]),
        ac_config=None,
        dump_folder="",
        fsdp=FSDPConfig(policy="per_step"),
        trainable=trainable,
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states()
    return model


def _stepper(
    options: argparse.Namespace, steps: int, device: torch.device, trainable: Trainable
) -> Callable[[], float]:
    """Return a function that runs one training step and returns its seconds."""
    model = _build(options, steps, device, trainable)
    optimizers = (
        AdamWConfig()
        .optimizer_config(exit_gate=True, trainable=trainable)
        .build(model_parts=[model])
    )
    if trainable == "all":
        loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
        loss_fn.entropy_weight = 0.05
    else:
        loss_fn = AdaptiveGateLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    shape = (options.batch, options.seq_len)
    generator = torch.Generator(device=device).manual_seed(0)
    tokens, labels = torch.randint(
        model.config.vocab_size, (2, *shape), device=device, generator=generator
    )
    positions = torch.arange(options.seq_len, device=device).expand(shape).contiguous()
    masks = model.get_attention_masks(positions)
    synchronize = titan_utils.device_module.synchronize

    def step() -> float:
        start = time.perf_counter()
        optimizers.zero_grad()
        loss, _ = loss_fn(model(tokens, positions, masks), labels, float(labels.numel()))
        loss.backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        synchronize()
        return time.perf_counter() - start

    return step


def _measure(options: argparse.Namespace, steps: int, device: torch.device) -> float:
    whole = _stepper(options, steps, device, "all")
    gate = _stepper(options, steps, device, "exit_gate")
    for _ in range(options.warmup):
        whole()
        gate()
    pairs = [(whole(), gate()) for _ in range(options.pairs)]
    ratios = [gate_seconds / whole_seconds for whole_seconds, gate_seconds in pairs]
    whole_median, gate_median = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    print(
        f"{steps:2} | {whole_median:.3f} | {gate_median:.3f} | "
        f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
    )
    return ratio


if __name__ == "__main__":
    raise SystemExit(main())
