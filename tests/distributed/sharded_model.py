"""A small sharded model, one step of it, and a count of what it sends."""

from collections import Counter
from typing import Any, Literal

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.distributed.parallel_model import parallel_model
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC, SelectiveAC
from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.family import decoder_config
from titan_loop.models.output import Collect
from titan_loop.objectives.expected_loss import ExpectedExitLoss

LAYERS, WINDOWS, SEQ_LEN, VOCABULARY = 4, 2, 16, 128
CHECKPOINTING = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
    "recurrent-step": RecurrentStepAC.Config(),
    "recurrent-step+full": RecurrentStepAC.Config(layers="full"),
}
PER_VISIT, PER_STEP = FSDPConfig(policy="per_visit"), FSDPConfig(policy="per_step")


NAMES = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "sum",
    "allgather_": "kept-gather",  # of the largest logits of tensor-parallel ranks
}
FUNCTIONAL = {  # what context and tensor parallelism call
    "all_gather_into_tensor": "part-gather",
    "reduce_scatter_tensor": "part-scatter",
}


class Collectives(TorchDispatchMode):
    """Counts what reaches the process group, and the bytes of each collective's largest side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.whole_bytes: Counter[str] = Counter()
        self.order: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = NAMES[func._schema.name.split("::")[1]]
            self.calls[name] += 1
            self.order.append(name)
            tensors = args[0] if name == "sum" else args[:2]
            sizes = [t.nbytes for t in tree_leaves(tensors) if isinstance(t, Tensor)]
            self.whole_bytes[name] += max(sizes)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._schema.name.split("::")[1] in FUNCTIONAL:
            name = FUNCTIONAL[func._schema.name.split("::")[1]]
            self.calls[name] += 1
            self.whole_bytes[name] += max(args[0].nbytes, result.nbytes)
        return result

    def counts(self) -> tuple[int, int, int]:
        return self.calls["gather"], self.calls["scatter"], self.calls["sum"]


def build(
    fsdp: FSDPConfig,
    *,
    options: OuroOptions | None = None,
    replicate: int = 1,
    context: int = 1,
    tensor: int = 1,
    checkpointing: str = "none",
    dtype: str = "float32",
    compile_backend: str | None = None,
    trainable: Trainable = "all",
    reshard: Literal["default", "always", "never"] = "default",
) -> LoopDecoder:
    options = options or OuroOptions(size="debugmodel", n_layers=LAYERS)
    model, _ = parallel_model(
        decoder_config(options, max_seq_len=128),
        ParallelismConfig(
            spmd_backend="partial_dtensor",
            fsdp_reshard_after_forward=reshard,
            data_parallel_replicate_degree=replicate,
            context_parallel_degree=context,
            tensor_parallel_degree=tensor,
        ),
        training=TrainingConfig(
            mixed_precision_param=dtype, local_batch_size=WINDOWS, disable_cuda_graphs=True
        ),
        compile_config=CompileConfig(
            enable=compile_backend is not None,
            components=["model"],
            backend=compile_backend or "inductor",
        ),
        ac_config=CHECKPOINTING[checkpointing],
        fsdp=fsdp,
        trainable=trainable,
    )
    return model


def loss_of(model: LoopDecoder) -> ExpectedExitLoss:
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    loss_fn.entropy_weight = 0.1
    return loss_fn


def micro_batch(seed: int, windows: int = WINDOWS, seq_len: int = SEQ_LEN) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(VOCABULARY, (windows, seq_len + 1), generator=generator)


def forward_backward(
    model: LoopDecoder, steps: int, seed: int = 0, collect: Collect = "all"
) -> Tensor:
    tokens = micro_batch(seed)
    output = model(tokens[:, :-1], recurrent_steps=steps, collect=collect)
    loss, _ = loss_of(model)(output, tokens[:, 1:], float(tokens.numel()))
    loss.backward()
    return loss.detach()


def gradients(model: LoopDecoder) -> dict[str, Tensor]:
    return {
        name: parameter.grad.full_tensor().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def expected_counts(
    policy: str, steps: int, micro_batches: int, hsdp: bool, *, layers: int = LAYERS
) -> tuple[int, ...]:
    """Embedding and head once a micro-batch, for the rest what README.md says."""
    if policy == "per_step":
        gathers = layers + 1 + 2 * micro_batches
    else:
        gathers = micro_batches * (2 * layers * steps + steps + 2)
    scatters = (layers + 3) * micro_batches
    return gathers, scatters, scatters if hsdp else 0


def is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and Shard(0) in parameter.placements
