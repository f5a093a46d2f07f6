"""One training step of the trainer's parts, without a loader: the step that the benchmarks time.

Forward, streamed loss, backward, clipping and fused AdamW on random tokens, on one device or on the
ranks of the default process group.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
import torch
import torch.distributed as dist
from conditions import parser_of
from timing import seconds_of
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools import utils as titan_utils

from tests.support.allocations import AllocationTrace
from titan_loop.distributed.float8 import Float8, in_float8
from titan_loop.distributed.loop_fsdp import FSDPConfig, FSDPPolicy, reshard_units
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.family import ModelOptions, decoder_config
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.training.metrics_processor import known_peak_flops

ENTROPY_WEIGHT = 0.05
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model, the batch and the way it is trained.

    Attributes:
        model: Architecture.
        seq_len: Tokens per window.
        windows: Number of windows per rank.
        compiled: Whether layers are compiled.
        checkpointing: Policy of activation checkpointing; None keeps all activations.
        masked: Whether attention gets the document mask, as in training on prepared text, even
            where plain causal attention would do.
        trainable: Parameters to train.
        fsdp_policy: Rule for what FSDP keeps gathered, where it is used (on a GPU also for one
            rank).
        float8: torchao's recipe for the layers' products; emulated on a CPU.
        compute_dtype: Dtype of the layers; None for bf16 on CUDA and fp32 on a CPU.
    """

    model: ModelOptions
    seq_len: int
    windows: int
    compiled: bool = False
    checkpointing: ActivationCheckpointing.Config | None = None
    masked: bool = False
    trainable: Trainable = "all"
    fsdp_policy: FSDPPolicy = "per_step"
    float8: Float8 = "off"
    compute_dtype: Literal["bfloat16", "float32"] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens in one rank's batch."""
        return self.windows * self.seq_len


def device() -> torch.device:
    """Return this process' device."""
    return titan_utils.get_local_device()


def build(job: Job) -> LoopDecoder:
    """Build, spread and initialise the model; bf16 under FSDP on CUDA, fp32 on CPU."""
    parallelism = ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
    dist_utils.set_spmd_backend(compat.SPMD_BACKEND)
    config = decoder_config(job.model, max_seq_len=job.seq_len)
    if job.float8 != "off":
        config = in_float8(config, job.float8)
    config.set_sharding(enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    world = dist.get_world_size() if dist.is_initialized() else 1
    usual: Literal["bfloat16", "float32"] = "bfloat16" if device().type == "cuda" else "float32"
    parallelize_loop_decoder(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, world),
        training=TrainingConfig(mixed_precision_param=job.compute_dtype or usual),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=job.compiled, components=["model"]),
        ac_config=job.checkpointing,
        dump_folder="",
        fsdp=FSDPConfig(policy=job.fsdp_policy),
        trainable=job.trainable,
    )
    model.to_empty(device=device())
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and labels, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = decoder_config(job.model, max_seq_len=job.seq_len).vocab_size
    drawn = torch.randint(vocabulary, (job.windows, job.seq_len + 1), generator=generator)
    drawn = drawn.to(device())
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def trainer_step(
    job: Job, model: LoopDecoder, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], torch.Tensor]:
    """Return a function that trains one step, with AdamW by default, and returns its loss."""
    tokens, labels = batch(job)
    loss_fn = _loss(job)
    loss_fn.set_lm_head(model.lm_head)
    positions = torch.arange(job.seq_len, device=device()).expand(tokens.shape).contiguous()
    inputs = (tokens, positions, model.get_attention_masks(positions)) if job.masked else (tokens,)

    def loss() -> torch.Tensor:
        return loss_fn(model(*inputs), labels, float(labels.numel()))[0]

    return optimizer_step(model, loss, optimizer)


def _loss(job: Job) -> ExpectedExitLoss | AdaptiveGateLoss:
    if job.trainable == "exit_gate":
        return AdaptiveGateLoss.Config().build(compile_config=CompileConfig())
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.entropy_weight = ENTROPY_WEIGHT
    return loss_fn


def optimizer_step(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a function that trains `model` one step on `loss_of` and returns the loss."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(parameters, **ADAMW)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        reshard_units(model)
        dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    return step


def extra_bytes(step: Callable[[], object], model: nn.Module) -> int:
    """Return the peak of one step beyond parameters, gradients and optimiser.

    Gradients are made within the step; the whole size of this rank's is subtracted from the peak.
    """
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    gradients = sum(parameter.nbytes for parameter in local)
    if device().type == "cuda":
        for parameter in model.parameters():
            parameter.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before - gradients
    for parameter in model.parameters():
        parameter.grad = None
    with AllocationTrace() as trace:
        step()
    return trace.peak_bytes - gradients


def matmul_flops(rows: int, inner: int, columns: int, *, repeats: int = 7) -> float:
    """Return the FLOP/s of a matrix product of this shape, in the dtype layers compute in."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    a = torch.randn(rows, inner, device=device(), dtype=dtype)
    b = torch.randn(inner, columns, device=device(), dtype=dtype)
    inner_repeats = max(1, int(2e9 / (2 * rows * inner * columns)))

    def multiply() -> None:
        for _ in range(inner_repeats):
            torch.mm(a, b)

    multiply()
    seconds = statistics.median(seconds_of(multiply) for _ in range(repeats))
    return 2 * rows * inner * columns * inner_repeats / seconds


def flops_per_step(job: Job) -> int:
    """Return the model FLOPs of one rank's step."""
    config = decoder_config(job.model, max_seq_len=job.seq_len)
    return job.tokens * int(config.training_flops(job.seq_len, config.recurrent_steps).total)


def mfu(flops: float, seconds: Sequence[float]) -> str:
    """Return a step's model FLOPs over the device's peak, in percent; "-" if that is unknown."""
    peak = known_peak_flops(titan_utils.device_module.get_device_name(device()))
    return "-" if peak is None else f"{flops / statistics.median(seconds) / peak:.1%}"


def step_parser(doc: str | None, *, pairs: int = 7) -> argparse.ArgumentParser:
    """Return a parser with the flags of programs that time training steps in turn."""
    parser = parser_of(doc)
    parser.add_argument("--pairs", type=int, default=pairs, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them")
    return parser


def start() -> None:
    """Set threads and device, and join a process group of one."""
    compat.start_runtime()
    titan_utils.device_module.set_device(device())
    dist.init_process_group("nccl" if device().type == "cuda" else "gloo")
