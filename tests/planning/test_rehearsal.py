"""Rehearsal: the real trainer as one rank of a world that is not there, and what it counts."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC, SelectiveAC

from titan_loop.cli.main import main
from titan_loop.distributed import muon
from titan_loop.distributed.devices import DEVICES
from titan_loop.distributed.muon import update_needs
from titan_loop.planning.absent_gpu import absent_gpu
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.rehearsal import NOT_REHEARSED, Rehearsed, rehearsal_lines, rehearse
from titan_loop.planning.same_assembly import _traits
from titan_loop.planning.stage_needs import recipe_needs
from titan_loop.planning.step_meter import StepMeter
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.testing.tiny import tiny_config
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

EIGHT = Cluster(nodes=2, gpus_per_node=4, gpu=DEVICES["h100-80gb"], mfu=0.4)
WIDEST = 0.35
"""Largest relative distance of plan's peak from what is measured: at a width of 64, temporaries and
index tensors that plan leaves out are a part of the whole."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """torchtitan's trainer turns automatic garbage collection off."""
    yield
    gc.enable()
    assert not dist.is_initialized()


def stage(**parallelism: int) -> LoopTrainer.Config:
    with compat.assuming("cuda"):
        config = tiny_config(Path("nowhere"), Path("nowhere"))
        config.training.mixed_precision_param = "bfloat16"
        for name, degree in parallelism.items():
            setattr(config.parallelism, f"{name}_degree", degree)
        config.model.vocab_size = 512
        config.training.local_batch_size = 1
        config.compile = CompileConfig(enable=False)
    return config


def rehearsed(config: LoopTrainer.Config, cluster: Cluster = EIGHT) -> Rehearsed:
    recipe = Recipe(name="tiny", stages=[Stage(name="only", config=config)])
    (found,) = rehearse(recipe, cluster, recipe_needs(recipe, cluster))
    return found


def assert_as_planned(found: Rehearsed) -> None:
    assert not found.fault
    assert found.moved.keys() == found.planned.keys()
    for kind, planned in found.planned.items():
        assert found.moved[kind].count == planned.count, kind
        # Padding, and a byte or two of what plan says it leaves out.
        assert found.moved[kind].received_bytes == pytest.approx(planned.received_bytes, rel=0.01)
    assert found.needs.memory.peak == pytest.approx(found.peak_bytes, rel=WIDEST)


def test_a_compiled_layer_with_flex_on_a_shared_window_is_assembled():
    """Flex, selective checkpointing, FSDP in bf16 and the gather of keys, in one full graph."""
    config = stage(context_parallel=2)
    config.activation_checkpoint = SelectiveAC.Config()
    config.compile = CompileConfig(enable=True, components=["model"])
    counters.clear()
    found = rehearsed(config)
    assert_as_planned(found)
    assert found.micro_batches == 2
    assert counters["stats"]["unique_graphs"] >= 1


def test_stages_that_differ_in_values_alone_are_rehearsed_once():
    first, alike, deeper, unregularised = (stage() for _ in range(4))
    alike.debug.seed, alike.learning_rate = 7, Schedule.constant(1e-5)
    deeper.recurrence.steps = Schedule.constant(3)
    unregularised.adamw.weight_decay = 0.0
    configs = {"a": first, "b": alike, "c": deeper, "d": unregularised}
    recipe = Recipe(name="tiny", stages=[Stage(name=n, config=c) for n, c in configs.items()])
    found = list(rehearse(recipe, EIGHT, recipe_needs(recipe, EIGHT)))
    assert [one.like for one in found] == ["", "a", "", ""]
    assert found[1].needs.name == "b"
    assert found[1].moved == found[0].moved
    assert " as a " in rehearsal_lines(found, EIGHT)[3]


def test_stages_with_another_memory_budget_are_not_alike():
    """Of other numbers with a fraction only the sign counts."""
    tight, loose, alike = (stage() for _ in range(3))
    tight.activation_checkpoint = MemoryBudgetAC.Config(memory_budget=0.2)
    loose.activation_checkpoint = MemoryBudgetAC.Config(memory_budget=0.8)
    alike.activation_checkpoint = MemoryBudgetAC.Config(memory_budget=0.8)
    alike.adamw.eps = 1e-5
    assert _traits(tight) != _traits(loose) == _traits(alike)


def test_hsdp_with_tensor_parallelism_and_muon_moves_what_plan_says():
    config = stage(tensor_parallel=2, data_parallel_replicate=2)
    config.optimizer.name = "muon"
    found = rehearsed(config)
    assert_as_planned(found)
    assert found.moved["all-to-all"].count == 2


def test_muon_holds_and_moves_what_plan_says():
    shapes, fake_mode = [(1000, 256), (256, 1000), (1024, 1024), (70, 80)], FakeTensorMode()
    needs = update_needs(shapes, shards=8, slices=1)
    with absent_gpu(EIGHT):
        mesh = init_device_mesh("cpu", (8,))
        with fake_mode, StepMeter(fake_mode) as meter:
            matrices = []
            for rows, columns in shapes:
                local = torch.empty(-(-rows // 8), columns)
                whole = {"shape": torch.Size((rows, columns)), "stride": (columns, 1)}
                matrix = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole)
                matrices.append(torch.nn.Parameter(matrix))
                matrices[-1].grad = torch.empty_like(matrix)
            optimizer = muon.Muon([{"params": matrices}], dtype=torch.bfloat16)
            optimizer.step()  # which makes the averages
            meter.reset()
            before = meter.live_bytes
            optimizer.step()
    assert meter.moved["all-to-all"].received_bytes == 2 * needs.received
    assert meter.peak_bytes - before == pytest.approx(2 * needs.held, rel=0.01)


def test_offloaded_weights_with_an_average_are_assembled():
    config = stage()
    config.training.enable_cpu_offload = True
    config.ema.decay = 0.9
    found = rehearsed(config)
    assert not found.fault
    assert found.moved["reduce-scatter"] == found.planned["reduce-scatter"]


def test_what_breaks_is_one_line_and_leaves_no_trace():
    new_group, resize = dist.new_group, torch.UntypedStorage.resize_
    config = stage()
    config.model.attention = "varlen"
    assert (
        rehearsed(config).fault
        == "aten.nonzero.default needs values, which fake tensors do not have"
    )
    assert dist.new_group is new_group
    assert torch.UntypedStorage.resize_ is resize
    assert "pin_memory" not in vars(torch.Tensor)
    assert compat.device_type() == "cpu"


def test_the_command_says_what_was_and_what_was_not_rehearsed(capsys):
    flags = ["--stage", "1a", "--gpus-per-node", "8", "--rehearse", "--model.size", "debugmodel"]
    flags += ["--training.seq-len", "64", "--batch.global-batch-tokens", "1024"]
    flags += ["--batch.multiple-of-windows", "8", "--recurrence.steps", "2"]
    assert main(["plan", "ouro_1_4b", *flags, "--compile.no-enable"]) == 0
    printed = capsys.readouterr().out
    assert "rehearsed as rank 0 of 8" in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("1a  ")]
    assert row.split()[1:5] == ["assembled", "2", "of", "2"]
    for what in NOT_REHEARSED:
        assert what in printed


def test_more_ranks_than_windows_are_refused_before_anything_is_assembled(capsys):
    flags = ["--stage", "53m-r1", "--nodes", "64", "--rehearse"]
    assert main(["plan", "ouro_scaling_study", *flags]) == 2
    said = capsys.readouterr()
    assert "rehearsed" not in said.out
    (line,) = said.err.splitlines()
    assert "a global batch of 128 windows does not divide" in line
    assert "512 data-parallel ranks; use --batch.global-batch-tokens 2097152" in line


def test_the_meter_sees_the_most_that_is_held_at_once():
    fake_mode = FakeTensorMode()
    with fake_mode, StepMeter(fake_mode) as meter:
        kept = torch.empty(256, dtype=torch.float32)
        view = kept[1:].view(-1)
        both = torch.empty(512) + torch.empty(512)
        assert meter.live_bytes == 1024 + 2048
        assert meter.peak_bytes == 1024 + 3 * 2048
        del both
        meter.reset()
        assert meter.peak_bytes == 1024
        kept.untyped_storage().resize_(0)
        with meter.paused():
            torch.empty(4096)
        del view
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 1024
