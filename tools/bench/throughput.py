"""Training throughput of a named size on random tokens: tokens/s, MFU and peak memory per R.

    python tools/bench/throughput.py --size 134m --recurrent-steps 1 4 --seq-len 4096 --compile

Forward, backward, clipping and the AdamW update of the real trainer's parts, on one device, without
a loader. Prints one row per R: the median step of `--steps` after `--warmup` and its range. Refuses
to run beside another load. Runs unchanged on a GPU, where parameters are bf16 under FSDP.
"""

import argparse
import statistics
import sys
import time

import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
import torch
import torch.distributed as dist
from conditions import add_load_flag, machine, require_quiet_machine
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.tools import utils as titan_utils

from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.sharding import set_loop_sharding
from titan_loop.models.sizes import ModelOptions, decoder_config
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.training.learning_rate import AdamWConfig
from titan_loop.training.metrics import known_peak_flops


def main() -> int:
    """Measure every R asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--full-checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    add_load_flag(parser)
    options = parser.parse_args()
    require_quiet_machine(options)
    compat.start_runtime()
    device = titan_utils.get_local_device()
    titan_utils.device_module.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    print(" ".join(sys.argv), "|", machine(device))
    print(" R | tokens/s (range) | MFU | peak memory GiB | step s")
    for steps in options.recurrent_steps:
        _measure(options, steps, device)
    dist.destroy_process_group()
    return 0


def _build(options: argparse.Namespace, steps: int, device: torch.device) -> LoopDecoder:
    parallelism = ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
    dist_utils.set_spmd_backend(compat.SPMD_BACKEND)
    size = ModelOptions(
        size=options.size, attention=options.attention, recurrent_steps=steps, exit_gate=steps > 1
    )
    config = decoder_config(size, max_seq_len=options.seq_len)
    set_loop_sharding(config, enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    parallelize_loop_decoder(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=options.compile, components=["model"]),
        ac_config=FullAC.Config() if options.full_checkpointing else None,
        dump_folder="",
        fsdp=FSDPConfig(policy="per_step"),
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states()
    return model


def _measure(options: argparse.Namespace, steps: int, device: torch.device) -> None:
    model = _build(options, steps, device)
    optimizers = AdamWConfig().optimizer_config(exit_gate=steps > 1).build(model_parts=[model])
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    loss_fn.entropy_weight = 0.05
    shape = (options.batch, options.seq_len)
    tokens, labels = torch.randint(model.config.vocab_size, (2, *shape), device=device)
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

    for _ in range(options.warmup):
        step()
    titan_utils.device_module.reset_peak_memory_stats()
    seconds = [step() for _ in range(options.steps)]
    median = statistics.median(seconds)
    rate = labels.numel() / median
    peak = known_peak_flops(titan_utils.device_module.get_device_name(device))
    flops = model.config.training_flops_per_token(options.seq_len, steps)
    mfu = "-" if peak is None else f"{flops * rate / peak:.1%}"
    memory = titan_utils.device_module.memory_stats(device)["reserved_bytes.all.peak"] / 2**30
    low, high = labels.numel() / max(seconds), labels.numel() / min(seconds)
    print(f"{steps:2} | {rate:,.0f} ({low:,.0f}-{high:,.0f}) | {mfu} | {memory:.2f} | {median:.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
