"""What is gathered and reduced when, counted at the process group, and that it changes no number.

`test_parity.py` compares both policies with one process on every layout; here the two are compared
with each other, bit for bit, where things could go stale: accumulation, evaluation, saving.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools import utils as titan_utils

from titan_loop.distributed import loop_fsdp
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.distributed.communication import Traffic, step_traffic
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.distributed.memory import estimate_memory, unit_parameters
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.distributed.step_shape import StepShape
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.sizes import SIZES, ModelOptions, decoder_config
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.testing.allocations import AllocationTrace

README = Path(loop_fsdp.__file__).with_name("README.md")
LAYERS, WINDOWS, SEQ_LEN, VOCABULARY = 4, 2, 16, 128
CHECKPOINTING = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
    "recurrent-step": RecurrentStepAC.Config(),
    "recurrent-step+full": RecurrentStepAC.Config(layers="full"),
}
PER_VISIT, PER_STEP = FSDPConfig(policy="per_visit"), FSDPConfig(policy="per_step")


NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "sum"}
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
            sizes = [t.nbytes for t in tensors if isinstance(t, Tensor)]
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
    options: ModelOptions | None = None,
    replicate: int = 1,
    context: int = 1,
    tensor: int = 1,
    checkpointing: str = "none",
    dtype: str = "float32",
    compile_backend: str | None = None,
    trainable: Trainable = "all",
    reshard: Literal["default", "always", "never"] = "default",
) -> LoopDecoder:
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        fsdp_reshard_after_forward=reshard,
        data_parallel_replicate_degree=replicate,
        context_parallel_degree=context,
        tensor_parallel_degree=tensor,
    )
    dist_utils.set_spmd_backend("partial_dtensor")
    options = options or ModelOptions(size="debugmodel", n_layers=LAYERS)
    torch.manual_seed(0)
    config = decoder_config(options, max_seq_len=128)
    config.set_sharding(enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    parallelize_loop_decoder(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        training=TrainingConfig(
            mixed_precision_param=dtype, local_batch_size=WINDOWS, disable_cuda_graphs=True
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(
            enable=compile_backend is not None,
            components=["model"],
            backend=compile_backend or "inductor",
        ),
        ac_config=CHECKPOINTING[checkpointing],
        dump_folder="",
        fsdp=fsdp,
        trainable=trainable,
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():  # off the symmetric start, the same under any policy
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def loss_of(model: LoopDecoder) -> ExpectedExitLoss:
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    loss_fn.entropy_weight = 0.1
    return loss_fn


def micro_batch(seed: int, windows: int = WINDOWS, seq_len: int = SEQ_LEN) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(VOCABULARY, (windows, seq_len + 1), generator=generator)


def forward_backward(model: LoopDecoder, steps: int, seed: int = 0) -> Tensor:
    tokens = micro_batch(seed)
    output = model(tokens[:, :-1], recurrent_steps=steps)
    loss, _ = loss_of(model)(output, tokens[:, 1:], float(tokens.numel()))
    loss.backward()
    return loss.detach()


def gradients(model: LoopDecoder) -> dict[str, Tensor]:
    return {
        name: parameter.grad.full_tensor().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


# --- collectives ----------------------------------------------------------------------------------

TABLE = [  # R, micro-batches, checkpointing
    (1, 1, "none"),
    (2, 1, "none"),
    (4, 1, "none"),
    (4, 1, "selective"),
    (4, 1, "full"),
    (4, 2, "none"),
]


def table_for(replicate: int) -> list[tuple[int, int, str]]:
    """Where reductions alone differ, in HSDP, what checkpointing gathers is not counted again."""
    return TABLE if replicate == 1 else [TABLE[0], TABLE[2], TABLE[-1]]


def count_table(policy: str, replicate: int) -> list[tuple[int, int, int]]:
    rows = []
    for steps, micro_batches, checkpointing in table_for(replicate):
        model = build(FSDPConfig(policy=policy), replicate=replicate, checkpointing=checkpointing)
        forward_backward(model, steps)  # lazy initialisation behind us
        reshard_units(model)
        with Collectives() as collectives:
            for seed in range(micro_batches):
                forward_backward(model, steps, seed)
            reshard_units(model)
        assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
        rows.append(collectives.counts())
    return rows


def expected_counts(policy: str, steps: int, micro_batches: int, hsdp: bool) -> tuple[int, ...]:
    """Embedding and head once a micro-batch, for the rest what README.md says."""
    if policy == "per_step":
        gathers = LAYERS + 1 + 2 * micro_batches
    else:
        gathers = micro_batches * (2 * LAYERS * steps + steps + 2)
    scatters = (LAYERS + 3) * micro_batches
    return gathers, scatters, scatters if hsdp else 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("policy", ["per_visit", "per_step"])
def test_collectives_of_a_step_are_those_of_the_readme(gloo_pool, policy, world):
    """Four ranks run HSDP 2 × 2, where every reduction is followed by an all-reduce."""
    for counted in gloo_pool(world).run(count_table, policy, world // 2):
        for row, (steps, micro_batches, checkpointing) in zip(
            counted, table_for(world // 2), strict=True
        ):
            assert row == expected_counts(policy, steps, micro_batches, world == 4), checkpointing
        if world == 2:
            readme = README.read_text(encoding="utf-8")
            for (gathers, scatters, _), (steps, micro_batches, name) in zip(
                counted, TABLE, strict=True
            ):
                row = rf"\| {policy} \| {steps} \| {micro_batches} \| {name} \|"
                assert re.search(rf"{row} {gathers} \| {scatters} \|", readme), f"README: {row}"


def traffic_of_a_step(
    policy: str, replicate: int, dtype: str, case: dict[str, Any]
) -> list[tuple[float, float]]:
    """Return counted and predicted bytes of gathers, scatters and sums, two micro-batches."""
    reshard, trainable = case.get("reshard", "default"), case.get("trainable", "all")
    options = ModelOptions(
        size="debugmodel", n_layers=LAYERS, tie_weights=case.get("tie_weights", False)
    )
    model = build(
        FSDPConfig(policy=policy),
        options=options,
        replicate=replicate,
        dtype=dtype,
        reshard=reshard,
        trainable=trainable,
    )
    model.recurrence.backward_steps = case.get("backward_steps")
    forward_backward(model, 3)
    reshard_units(model)
    with Collectives() as collectives:
        for seed in range(2):
            forward_backward(model, 3, seed)
        reshard_units(model)
    shard_degree = dist.get_world_size() // replicate
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=3,
        compute_bytes=getattr(torch, dtype).itemsize,
        shard_degree=shard_degree,
        reshard_after_forward=reshard,
        trainable=trainable,
        backward_steps=model.recurrence.backward_steps,
    )
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    traffic = step_traffic(
        config, shape, hold_layers=policy == "per_step", micro_batches=2, replicas=replicate
    )
    ring = {"gather": 1 - 1 / shard_degree, "scatter": 1 - 1 / shard_degree}
    ring["sum"] = 2 * (1 - 1 / replicate)
    kinds = {"gather": "all-gather", "scatter": "reduce-scatter", "sum": "all-reduce"}
    pairs = []
    for name, kind in kinds.items():
        predicted = [entry for entry in traffic if entry.kind == kind]
        assert collectives.calls[name] == sum(entry.count for entry in predicted)
        counted = collectives.whole_bytes[name] * ring[name]
        pairs.append((counted, sum(entry.received_bytes for entry in predicted)))
    return pairs


@pytest.mark.parametrize(
    ("policy", "replicate", "dtype", "case"),
    [
        ("per_visit", 1, "float32", {}),
        ("per_step", 1, "bfloat16", {}),
        ("per_step", 2, "float32", {}),
        ("per_visit", 1, "float32", {"reshard": "never"}),
        ("per_visit", 1, "float32", {"reshard": "never", "backward_steps": 2}),
        ("per_visit", 1, "float32", {"reshard": "never", "trainable": "exit_gate"}),
        ("per_visit", 1, "float32", {"reshard": "always", "backward_steps": 2}),
        ("per_visit", 1, "float32", {"tie_weights": True}),
        ("per_visit", 1, "float32", {"trainable": "exit_gate"}),
    ],
)
def test_bytes_of_a_step_are_those_predicted(gloo_pool, policy, replicate, dtype, case):
    for pairs in gloo_pool(2 * replicate).run(traffic_of_a_step, policy, replicate, dtype, case):
        for counted, predicted in pairs:
            assert counted == pytest.approx(predicted)


def counted_and_predicted(
    collectives: Collectives, traffic: list[Traffic]
) -> list[tuple[int, int, float, float]]:
    """Return counted and predicted calls, and bytes likewise, of gathers and of scatters."""
    return [
        (
            collectives.calls[name],
            sum(t.count for t in traffic if t.kind == kind),
            collectives.whole_bytes[name] / 2,
            sum(t.received_bytes for t in traffic if t.kind == kind),
        )
        for name, kind in (("part-gather", "all-gather"), ("part-scatter", "reduce-scatter"))
    ]


def keys_and_values_of_a_step(checkpointing: str) -> list[tuple[int, int, float, float]]:
    """Return counted and predicted collectives of keys and values, their bytes likewise."""
    model = build(PER_STEP, context=2, checkpointing=checkpointing)
    dims = ParallelDims.from_config(ParallelismConfig(context_parallel_degree=2), 2)
    share = share_of_rank(dims, SEQ_LEN, "cpu")
    assert share is not None
    tokens = torch.randint(VOCABULARY, (WINDOWS, SEQ_LEN + 1))
    positions = torch.arange(SEQ_LEN).expand(WINDOWS, -1)
    with Collectives() as collectives:
        output = model(
            tokens[:, :-1][:, share.queries_L],
            positions[:, share.queries_L],
            model.get_attention_masks(positions, share),
            recurrent_steps=3,
        )
        loss, _ = loss_of(model)(output, tokens[:, 1:][:, share.queries_L], 1.0)
        loss.backward()
        reshard_units(model)
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=3,
        checkpointing=checkpointing,  # pyright: ignore[reportArgumentType]
        compute_bytes=4,
        shard_degree=2,
        context_parallel_degree=2,
    )
    traffic = [t for t in step_traffic(config, shape, hold_layers=True) if t.what == "keys, values"]
    return counted_and_predicted(collectives, traffic)


@pytest.mark.parametrize("checkpointing", ["none", "full", "recurrent-step+full"])
def test_keys_and_values_travel_as_often_as_predicted(gloo_pool, checkpointing):
    for kinds in gloo_pool(2).run(keys_and_values_of_a_step, checkpointing):
        for calls, predicted_calls, moved, predicted_bytes in kinds:
            assert (calls, moved) == (predicted_calls, predicted_bytes)


def states_of_a_step(checkpointing: str) -> list[tuple[int, int, float, float]]:
    """Return counted and predicted collectives of sequence-parallel states, bytes likewise."""
    model = build(PER_VISIT, tensor=2, checkpointing=checkpointing)
    dims = ParallelDims.from_config(
        ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor"), 2
    )
    tokens = torch.zeros(WINDOWS, SEQ_LEN + 1, dtype=torch.int64)  # the same on both ranks
    with Collectives() as collectives, dist_utils.get_spmd_context(parallel_dims=dims)():
        output = model(tokens[:, :-1], recurrent_steps=3)
        loss, _ = loss_of(model)(output, tokens[:, 1:], 1.0)
        loss.backward()
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=3,
        checkpointing=checkpointing,  # pyright: ignore[reportArgumentType]
        compute_bytes=4,
        tensor_parallel_degree=2,
    )
    traffic = [t for t in step_traffic(config, shape, hold_layers=False) if t.what == "states"]
    return counted_and_predicted(collectives, traffic)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "recurrent-step+full"])
def test_states_under_sequence_parallelism_travel_as_often_as_predicted(gloo_pool, checkpointing):
    for kinds in gloo_pool(2).run(states_of_a_step, checkpointing):
        for calls, predicted_calls, moved, predicted_bytes in kinds:
            assert (calls, moved) == (predicted_calls, predicted_bytes)


def events_of_a_step() -> list[str]:
    """Return gathers and layer starts of one forward pass in order, at R = 2."""
    model = build(PER_STEP)
    collectives = Collectives()
    for name, layer in model.layers.items():
        layer.attention_norm.register_forward_pre_hook(
            lambda *_, name=name: collectives.order.append(name)
        )
    model.norm.register_forward_hook(lambda *_: collectives.order.append("norm"))
    with collectives:
        model(micro_batch(0)[:, :-1], recurrent_steps=2)
    return collectives.order


def test_each_gather_is_issued_before_the_layer_ahead_of_it_computes(gloo_pool):
    first = ["gather", "gather"]  # embedding and layer 0, before anything runs
    for index in range(LAYERS):
        first += ["gather", str(index)]  # the next layer's, and norm's with the last
    second = [str(index) for index in range(LAYERS)]
    for order in gloo_pool(2).run(events_of_a_step):
        assert order == [*first, "norm", *second, "norm"]


# --- the same numbers -----------------------------------------------------------------------------


def compare_policies(changes: dict[str, Any]) -> None:
    """Two accumulated micro-batches of different R, then another step, bit for bit."""
    results = []
    for fsdp in (PER_VISIT, PER_STEP):
        model = build(fsdp, **changes)
        losses = []
        for steps in ((4, 1), (2, 3)):
            losses += [forward_backward(model, r, seed) for seed, r in enumerate(steps)]
            reshard_units(model)
            results.append({**gradients(model), "losses": torch.stack(losses)})
            update(model)
    for per_visit, per_step in zip(results[:2], results[2:], strict=True):
        assert per_visit.keys() == per_step.keys()
        for name, value in per_visit.items():
            assert torch.equal(value, per_step[name]), name


def update(model: LoopDecoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "checkpointing": "full"},
        {"compile_backend": "aot_eager"},
        {"options": ModelOptions(size="debugmodel", tie_weights=True)},
        {"trainable": "exit_gate"},
    ],
    ids=["bf16", "bf16-full", "compiled", "tied", "gate-only"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_policies_agree_bit_for_bit(gloo_pool, changes):
    gloo_pool(2).run(compare_policies, changes)


def steps_with_evaluation(policy: str, evaluate: bool, tie: bool) -> list[dict[str, Tensor]]:
    model = build(
        FSDPConfig(policy=policy), options=ModelOptions(size="debugmodel", tie_weights=tie)
    )
    results = []
    for seed in range(3):
        if evaluate:
            nats = evaluation(model)
            assert all(_is_sharded(p) for name, p in model.named_parameters() if not tie), seed
        loss = forward_backward(model, 2, seed)
        reshard_units(model)
        update(model)
        results.append({"loss": loss, "nats": nats if evaluate else loss})
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return [*results, state]


@torch.no_grad()
def evaluation(model: LoopDecoder) -> Tensor:
    tokens = micro_batch(99)
    output = model(tokens[:, :-1], recurrent_steps=3, collect="all")
    weight_RBL = torch.zeros(3, WINDOWS, SEQ_LEN)
    labels_BL = tokens[:, 1:].contiguous()
    _, ce_RBL = model.lm_head(output.hidden_RBLD, labels_BL=labels_BL, weight_RBL=weight_RBL)
    return ce_RBL.sum()


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and Shard(0) in parameter.placements


def check_evaluation(tie: bool) -> None:
    want = steps_with_evaluation("per_visit", True, tie)
    for policy, evaluate in (("per_step", True), ("per_step", False), ("per_visit", False)):
        got = steps_with_evaluation(policy, evaluate, tie)
        for a, b in zip(want, got, strict=True):
            for name in a:
                if evaluate or name != "nats":
                    assert torch.equal(a[name], b[name]), (policy, evaluate, name)


@pytest.mark.parametrize("tie", [False, True])
def test_evaluation_between_steps_frees_what_it_gathered_and_reads_fresh_weights(gloo_pool, tie):
    gloo_pool(2).run(check_evaluation, tie)


def states_while_held() -> None:
    """Before `reshard_units` the layers' parameters are the gathered ones, but not the saved."""
    model = build(PER_STEP)
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    forward_backward(model, 2)
    layer = model.layers["0"]
    assert isinstance(layer, FSDPModule)
    assert not any(_is_sharded(p) for p in layer.parameters())
    state = model.state_dict()
    assert all(_is_sharded(value) for value in state.values())
    assert before.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), before[name]), name
    assert all(_is_sharded(p) and p.grad is not None for p in model.parameters())


def test_a_state_taken_while_layers_are_held_is_sharded_and_right(gloo_pool):
    gloo_pool(2).run(states_while_held)


# --- fp32 sum over visits -------------------------------------------------------------------------


def visit_sum_errors(options: dict[str, Any]) -> dict[bool, float]:
    """Return the largest relative error of a layer's gradient with and without the fp32 sum.

    The reference runs the same bf16 model with separate copies of the layers' weights per visit
    and adds their gradients up in float64: what is left is the rounding of the sum.
    """
    reference: dict[str, Tensor] = {}
    errors = {}
    for wide in (False, True):
        fsdp = FSDPConfig(policy=options["policy"], fp32_visit_sum=wide)
        model = build(fsdp, dtype="bfloat16", checkpointing=options["checkpointing"])
        if not reference:
            reference = gradient_of_separate_visits(model)
        forward_backward(model, 4)
        reshard_units(model)
        got = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients(model).items()}
        errors[wide] = max(
            float((got[name] - want).norm() / want.norm()) for name, want in reference.items()
        )
    return errors


def gradient_of_separate_visits(sharded: LoopDecoder) -> dict[str, Tensor]:
    whole = {
        name.replace("_checkpoint_wrapped_module.", ""): value.full_tensor()
        for name, value in sharded.state_dict().items()
    }
    model = decoder_config(
        ModelOptions(size="debugmodel", n_layers=LAYERS), max_seq_len=128
    ).build()
    with torch.no_grad():
        model.init_states()
    model.load_state_dict(whole, strict=False)
    for part in (model.tok_embeddings, model.layers, model.lm_head):
        part.bfloat16()
    visits: list[tuple[str, Tensor]] = []

    def separately(index: str, layer: torch.nn.Module, forward: Callable[..., Tensor]) -> Any:
        def visit(x_BLD: Tensor, *args: Any) -> Tensor:
            copies = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
            for copy in copies.values():
                copy.grad_dtype = torch.float32  # a composed norm's own gradients are fp32
            visits.extend((f"layers.{index}.{name}", copy) for name, copy in copies.items())
            layer.forward = forward
            # As under FSDP: the input's two gradients inside the layer are added up first.
            result = functional_call(layer, copies, (x_BLD.clone(), *args))
            layer.forward = visit
            return result

        return visit

    for index, layer in model.layers.items():
        layer.forward = separately(index, layer, layer.forward)
    forward_backward(model, 4)
    total: dict[str, Tensor] = {}
    for name, copy in visits:
        total[name] = total.get(name, torch.zeros_like(copy).double()) + copy.grad.double()
    for value in total.values():
        dist.all_reduce(value)
    return total


# One fp32 rounding per visit and rank is left; bf16 keeps 8 bits and rounds three times.
FP32_SUM_ERROR, BF16_SUM_ERROR = 1e-6, 1e-3


@pytest.mark.parametrize("policy", ["per_visit", "per_step"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fp32_visit_sum_leaves_no_bf16_rounding_of_the_sum(gloo_pool, policy, checkpointing):
    options = {"policy": policy, "checkpointing": checkpointing}
    for errors in gloo_pool(2).run(visit_sum_errors, options):
        assert errors[True] < FP32_SUM_ERROR
        assert errors[False] > BF16_SUM_ERROR


# --- memory ---------------------------------------------------------------------------------------

# The estimate leaves out temporaries, and gloo's thread frees its buffers when it likes.
ESTIMATE_TOLERANCE = 0.2


def measured_and_estimated(case: dict[str, Any]) -> tuple[int, float, int, float]:
    """Return transient peaks, and bytes alive between the backward passes of steps 2 and 1."""
    options = ModelOptions(size="quickstart", n_layers=4, vocab_size=VOCABULARY)
    fsdp = FSDPConfig(policy=case["policy"], fp32_visit_sum=case.get("wide", False))
    model = build(
        fsdp,
        options=options,
        checkpointing=case["checkpointing"],
        dtype=case["dtype"],
        reshard=case.get("reshard", "default"),
    )
    tokens = micro_batch(0, case["windows"], case["seq_len"])
    steps = case["steps"]

    def run(trace: AllocationTrace | None) -> None:
        output = model(tokens[:, :-1], recurrent_steps=steps)
        if trace is not None:
            output.hidden_RBLD[0].register_hook(lambda _: trace.mark("step 1"))
        loss, _ = loss_of(model)(output, tokens[:, 1:], float(tokens.numel()))
        loss.backward()
        reshard_units(model)

    run(None)
    run(None)
    with AllocationTrace() as trace:
        run(trace)
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=case["windows"],
        seq_len=case["seq_len"],
        recurrent_steps=steps,
        checkpointing=case["checkpointing"],
        compute_bytes=getattr(torch, case["dtype"]).itemsize,
        shard_degree=dist.get_world_size(),
        fp32_visit_sum=case.get("wide", False),
        reshard_after_forward=case.get("reshard", "default"),
        fused_norms=False,
    )
    estimate = estimate_memory(config, shape, hold_layers=case["policy"] == "per_step")
    layers = LAYERS * unit_parameters(config).layer
    return trace.peak_bytes, estimate.transient_peak, trace.at("step 1"), layers


LONG = {"windows": 2, "seq_len": 128}  # activations dominate
SHORT = {"windows": 1, "seq_len": 8}  # weights dominate
MEMORY_CASES = {
    "R1": dict(LONG, policy="per_visit", checkpointing="none", dtype="float32", steps=1),
    "R4": dict(LONG, policy="per_visit", checkpointing="none", dtype="float32", steps=4),
    "R4-held": dict(LONG, policy="per_step", checkpointing="none", dtype="float32", steps=4),
    "R4-bf16": dict(LONG, policy="per_step", checkpointing="none", dtype="bfloat16", steps=4),
    "selective": dict(LONG, policy="per_step", checkpointing="selective", dtype="float32", steps=4),
    "full": dict(LONG, policy="per_step", checkpointing="full", dtype="float32", steps=4),
    "by-step": dict(
        LONG, policy="per_step", checkpointing="recurrent-step", dtype="float32", steps=4
    ),
    "by-step-and-layer": dict(
        LONG, policy="per_step", checkpointing="recurrent-step+full", dtype="float32", steps=4
    ),
    "never": dict(
        LONG, policy="per_visit", checkpointing="full", dtype="float32", steps=4, reshard="never"
    ),
    "weights": dict(SHORT, policy="per_step", checkpointing="full", dtype="float32", steps=4),
}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_estimated_peak_is_near_the_measured_one(gloo_pool, case):
    """With `-rP` the numbers are shown: the table of `titan_loop/distributed/README.md`."""
    ranks = gloo_pool(2).run(measured_and_estimated, MEMORY_CASES[case])
    peak, estimated, _, _ = ranks[0]
    print(f"{case} | {peak / 2**20:.1f} | {estimated / 2**20:.1f} | {estimated / peak - 1:+.0%}")
    for peak, estimated, _, _ in ranks:
        assert estimated == pytest.approx(peak, rel=ESTIMATE_TOLERANCE)


@pytest.mark.parametrize(
    ("policy", "dtype", "wide", "bytes_per_parameter"),
    [
        ("per_visit", "float32", False, 4),
        ("per_visit", "bfloat16", False, 2),
        ("per_visit", "bfloat16", True, 4),
        ("per_step", "bfloat16", False, 2 + 2),  # gradient and gathered weight
        ("per_step", "bfloat16", True, 4 + 2),
    ],
)
def test_all_layers_unsharded_gradients_are_alive_between_steps_2_and_1(
    gloo_pool, policy, dtype, wide, bytes_per_parameter
):
    """With 8 tokens there is hardly anything but weights; one gathered layer of four at most."""
    case = dict(SHORT, policy=policy, checkpointing="full", dtype=dtype, steps=2, wide=wide)
    for _, _, alive, parameters in gloo_pool(2).run(measured_and_estimated, case):
        print(f"{policy} {dtype} {wide} | {alive / parameters:.2f} | {bytes_per_parameter}")
        in_flight = 3 * getattr(torch, dtype).itemsize / LAYERS  # per_visit's gathers
        assert alive >= 0.98 * bytes_per_parameter * parameters
        assert alive <= 1.15 * (bytes_per_parameter + in_flight) * parameters


def layers_gathered_at_norm(checkpointing: str) -> list[int]:
    """Return how many layers are gathered whenever the norm has run: forward, then recomputed."""
    model = build(PER_VISIT, checkpointing=checkpointing)
    gathered: list[int] = []

    def count(*_: Any) -> None:
        layers = model.layers.values()
        gathered.append(sum(not any(map(_is_sharded, layer.parameters())) for layer in layers))

    model.norm.register_forward_hook(count)
    forward_backward(model, 2)
    return gathered


def test_a_recomputed_step_gathers_all_of_its_layers_under_per_visit_too(gloo_pool):
    """So the estimate counts them all, as under per_step."""
    forward, recomputed = [0, 0], [LAYERS, LAYERS]
    assert gloo_pool(2).run(layers_gathered_at_norm, "recurrent-step") == 2 * [forward + recomputed]
    config = decoder_config(ModelOptions(size="134m"), max_seq_len=128)
    for checkpointing, all_of_them in (("recurrent-step", True), ("full", False)):
        shape = StepShape(windows=1, seq_len=128, recurrent_steps=4, checkpointing=checkpointing)
        held, visited = (estimate_memory(config, shape, hold_layers=h) for h in (True, False))
        assert (held.gathered == visited.gathered) == all_of_them


def persistent_bytes(tie: bool) -> tuple[list[int], list[float]]:
    """Return allocated and estimated bytes of parameters, gradients and AdamW's moments."""
    model = build(PER_STEP, options=ModelOptions(size="quickstart", tie_weights=tie))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward_backward(model, 2)
    reshard_units(model)
    optimizer.step()
    local = [parameter.to_local() for parameter in model.parameters()]  # pyright: ignore
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # pyright: ignore
    moments = [
        value.to_local()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=2,
        compute_bytes=4,
        shard_degree=dist.get_world_size(),
    )
    memory = estimate_memory(config, shape, hold_layers=True)
    measured = [
        sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in part}.values())
        for part in (local, gradients, moments)
    ]
    return measured, [memory.parameters, memory.gradients, memory.optimizer]


# The gate's only rows are on one rank, which alone has moments of them.
GATE_ELSEWHERE = 1e-3


@pytest.mark.parametrize("tie", [False, True])
def test_persistent_bytes_are_those_allocated(gloo_pool, tie):
    for measured, estimated in gloo_pool(2).run(persistent_bytes, tie):
        assert estimated == pytest.approx(measured, rel=GATE_ELSEWHERE)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_unit_parameters_are_those_of_the_built_model(size, tie):
    config = decoder_config(ModelOptions(size=size, tie_weights=tie), max_seq_len=32)
    with torch.device("meta"):
        model = config.build()
    units = unit_parameters(config)
    assert units.total == sum(p.numel() for p in model.parameters())
    assert units.layer == sum(p.numel() for p in model.layers["0"].parameters())


def gathers_under_auto(total_memories: list[int], reshard: Literal["default", "always"]) -> int:
    module = titan_utils.device_module
    real = module.get_device_properties
    total_memory = total_memories[dist.get_rank()]
    module.get_device_properties = lambda device: type("P", (), {"total_memory": total_memory})
    try:
        model = build(FSDPConfig(), reshard=reshard)
    finally:
        module.get_device_properties = real
    with Collectives() as collectives:
        forward_backward(model, 2)
    return collectives.counts()[0]


@pytest.mark.parametrize(
    ("memories", "policy"),
    [
        ([2**40, 2**40], "per_step"),
        ([2**20, 2**20], "per_visit"),
        ([2**40, 2**20], "per_visit"),  # all ranks alike: gathers have to match
    ],
)
def test_auto_holds_layers_where_the_estimate_fits(gloo_pool, memories, policy):
    want = expected_counts(policy, 2, 1, hsdp=False)[0]
    assert gloo_pool(2).run(gathers_under_auto, memories, "default") == [want, want]


def test_auto_frees_layers_where_that_is_asked_for(gloo_pool):
    least = expected_counts("per_visit", 2, 1, hsdp=False)[0]  # always frees more units yet
    counts = gloo_pool(2).run(gathers_under_auto, [2**40, 2**40], "always")
    assert counts[0] == counts[1] >= least


# --- settings -------------------------------------------------------------------------------------


def test_contradicting_settings_are_refused():
    always = ParallelismConfig(fsdp_reshard_after_forward="always")
    with pytest.raises(UserError, match=r"always contradicts fsdp\.policy=per_step"):
        PER_STEP.check(always)
    PER_VISIT.check(always)
    FSDPConfig().check(always)
    with pytest.raises(UserError, match=r"fsdp\.policy=per_stop is unknown; nearest: per_step"):
        FSDPConfig(policy="per_stop").check(ParallelismConfig())  # pyright: ignore
