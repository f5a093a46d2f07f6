"""Compilation on CPU: the same numbers, few compilations, no more memory than eager."""

import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    MemoryBudgetAC,
    SelectiveAC,
)

from tests.support.allocations import AllocationTrace
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.distributed.compiler import (
    forget_compiled_stage,
    keep_compiled_code,
    missing_compiler,
)
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder

SEQ_LEN = 32
# Inductor fuses norms and activations, so fp32 sums run in another order.
COMPILED_TOLERANCE = 1e-4
DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def parallelized(
    model: LoopDecoder,
    enable: bool,
    *,
    backend: Any = "inductor",
    policy: ActivationCheckpointing.Config | None = None,
    dtype: Literal["bfloat16", "float32"] = "float32",
    graphs: bool = False,
) -> LoopDecoder:
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    return parallelize_loop_decoder(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=enable, components=["model"], backend=backend),
        ac_config=policy,
        dump_folder="",
        graphs=graphs,
    )


def model_of(options: ModelOptions | None = None) -> LoopDecoder:
    torch.manual_seed(0)
    return build_decoder(options or OuroOptions(size="debugmodel"), max_seq_len=SEQ_LEN)


def compare_gradients(compiled: LoopDecoder, got: Tensor, eager: LoopDecoder, want: Tensor):
    direction = torch.randn_like(want)  # not along the state: the final norm takes that out
    (want * direction).mean().backward()
    (got * direction).mean().backward()
    expected = {name: p.grad for name, p in eager.named_parameters()}
    trained = 0
    for name, parameter in compiled.named_parameters():
        gradient = expected[name.replace("_orig_mod.", "")]
        if gradient is not None:
            atol = COMPILED_TOLERANCE * float(gradient.abs().max())
            torch.testing.assert_close(parameter.grad, gradient, atol=atol, rtol=0)
            trained += 1
    assert trained > len(eager.layers) * 5


@pytest.mark.parametrize(("world_size", "shared"), [("2", True), ("4", False)])
def test_ranks_of_several_nodes_do_not_share_compiled_code(
    tmp_path, monkeypatch, world_size, shared
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    keep_compiled_code(tmp_path)
    assert (os.environ.get("TORCHINDUCTOR_CACHE_DIR") == str(tmp_path)) == shared
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")  # by the user
    keep_compiled_code(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"


@pytest.mark.slow
@DYNAMO_WARNS
def test_compiled_layers_give_the_same_numbers_and_are_compiled_once(
    tmp_path, monkeypatch, inductor
):
    """Once for every R, and once for all starts: the next one finds them in the folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back as it was
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code(tmp_path)
    options = OuroOptions(size="debugmodel", n_layers=1)  # the layers share their compiled code
    eager, compiled = model_of(options), parallelized(model_of(options), enable=True)
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    torch._dynamo.reset()
    counters.clear()  # other tests of this process compile, too
    graphs = []
    for steps in (2, 1, 3):
        want = eager(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1]
        got = compiled(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1]
        torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]
    compare_gradients(compiled, got, eager, want)
    cache = counters["aot_autograd"]
    assert (cache["autograd_cache_hit"], cache["autograd_cache_miss"] > 0) == (0, True)
    torch._dynamo.reset()
    parallelized(model_of(options), enable=True)(tokens, positions, recurrent_steps=1)
    assert cache["autograd_cache_hit"] > 0


POLICIES = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "recurrent-step+full": RecurrentStepAC.Config(layers="full"),
}


@DYNAMO_WARNS
def test_visits_share_a_compilation_for_each_window_and_each_mode():
    """R is outside: 1 to 8 steps, two windows and two modes take four graphs."""
    options = OuroOptions(size="debugmodel", n_layers=1)
    policy = RecurrentStepAC.Config()
    model = parallelized(model_of(options), True, backend="aot_eager", policy=policy)
    torch._dynamo.reset()
    counters.clear()
    for window in (SEQ_LEN // 2, SEQ_LEN):
        tokens = torch.randint(128, (2, window))
        positions = torch.arange(window).expand(2, -1).contiguous()
        for steps in (1, 3, 8):
            model(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1].mean().backward()
        model.eval()
        with torch.no_grad():
            model(tokens, positions, recurrent_steps=3)
        model.train()
        model(tokens, positions, recurrent_steps=2).hidden_RBLD[-1].mean().backward()
    assert counters["stats"]["unique_graphs"] == 4


@DYNAMO_WARNS
@pytest.mark.parametrize(
    ("policy", "entries"), [(None, 3), (RecurrentStepAC.Config(), 3), (SelectiveAC.Config(), 6)]
)
def test_a_visit_is_one_graph_unless_its_layers_are_recomputed(policy, entries):
    entered = []

    def backend(graph, inputs):
        return lambda *args: [entered.append(graph), graph(*args)][1]

    model = parallelized(model_of(), True, backend=backend, policy=policy)
    torch._dynamo.reset()
    model(torch.randint(128, (2, SEQ_LEN)), recurrent_steps=3)
    assert len(entered) == entries


@DYNAMO_WARNS
def test_models_of_other_widths_and_windows_compile_in_one_process():
    torch._dynamo.reset()
    for dim, layers in ((64, 1), (128, 2)):
        shape = {"dim": dim, "n_heads": dim // 32, "n_layers": layers}
        options = OuroOptions(size="debugmodel", **shape)
        own = parallelized(build_decoder(options, max_seq_len=dim), True, backend="aot_eager")
        tokens = torch.randint(128, (128 // dim, dim))  # windows as long as the state is wide
        own(tokens, recurrent_steps=2).hidden_RBLD[-1].mean().backward()


def test_a_stage_leaves_the_next_no_option_of_the_compiler():
    budget, inductor = torch._functorch.config, torch._inductor.config
    with budget.patch(activation_memory_budget=1.0), inductor.patch(emulate_precision_casts=False):
        parallelized(model_of(), False, policy=MemoryBudgetAC.Config(memory_budget=0.2))
        inductor.emulate_precision_casts = True  # as float8's row-wise recipe does
        assert budget.activation_memory_budget == 0.2
        forget_compiled_stage()
        assert (budget.activation_memory_budget, inductor.emulate_precision_casts) == (1.0, False)


@DYNAMO_WARNS
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_layers_keep_no_more_for_the_backward_pass_than_eager_ones(policy):
    """A compiler that saw all of a visit's layers, or several visits, might keep more."""
    kept = []
    tokens = torch.randint(128, (8, SEQ_LEN))
    positions = torch.arange(SEQ_LEN).expand(8, -1).contiguous()
    for enable in (False, True):
        model = parallelized(
            model_of(),
            enable,
            backend="aot_eager_decomp_partition",
            policy=POLICIES[policy],
        )
        torch._dynamo.reset()
        model(tokens, positions, recurrent_steps=1).hidden_RBLD[-1].mean().backward()
        with AllocationTrace() as trace:
            state = model(tokens, positions, recurrent_steps=4).hidden_RBLD[-1]
            trace.mark("kept")
        kept.append(trace.at("kept"))
        del state  # else freed, and counted, in the second trace
    eager, compiled = kept
    assert compiled <= 1.05 * eager


def test_without_a_compiler_one_line_says_so_and_layers_run_eagerly(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = parallelized(model_of(), enable=True)
    assert "no C++ compiler (CXX=no-such-compiler) found; running eagerly" in caplog.text
    tokens = torch.randint(128, (1, SEQ_LEN))
    positions = torch.arange(SEQ_LEN).expand(1, -1).contiguous()
    assert model(tokens, positions, recurrent_steps=1).hidden_RBLD[-1].isfinite().all()


@pytest.mark.parametrize(
    ("device", "present", "environment", "missing"),
    [
        ("cpu", ["g++"], {}, None),
        ("cpu", ["g++"], {"CXX": "absent"}, "no C++ compiler (CXX=absent)"),
        ("cuda", ["clang"], {}, None),
        ("cuda", ["g++"], {}, "no C compiler (gcc or clang)"),
    ],
)
def test_compilers_are_looked_for_where_torch_does(
    monkeypatch, tmp_path: Path, device, present, environment, missing
):
    for name in present:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert missing_compiler(device) == missing
