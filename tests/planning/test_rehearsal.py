"""Rehearsal: the real trainer as one rank of a world that is not there, and what it counts."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.distributed.sharded_model import expected_counts
from tests.support.tiny import SEQ_LEN, tiny_config
from titan_loop.cli.main import main
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.distributed.compiler import LoopCompileConfig
from titan_loop.distributed.devices import DEVICES
from titan_loop.planning import rehearsal
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.measured_step import CACHE_VARIABLE, MeasuredStep
from titan_loop.planning.plan_table import rehearsal_lines
from titan_loop.planning.rehearsal import Rehearsed, gpu_peak_bytes, known_peak_bytes, rehearse
from titan_loop.planning.stage_needs import StageNeeds, recipe_needs
from titan_loop.planning.step_meter import Moved
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

LAYERS = 2
EIGHT = Cluster(nodes=2, gpus_per_node=4, gpu=DEVICES["h100-80gb"], mfu=0.4)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """torchtitan's trainer turns automatic garbage collection off."""
    yield
    gc.enable()
    assert not dist.is_initialized()


def stage(**parallelism: int) -> LoopTrainer.Config:
    """Two layers and two recurrent steps: the fewest that are visited, gathered and held again."""
    with compat.assuming("cuda"):
        config = tiny_config(Path("nowhere"), Path("nowhere"))
        config.training.mixed_precision_param = "bfloat16"
        for name, degree in parallelism.items():
            setattr(config.parallelism, f"{name}_degree", degree)
        config.model.vocab_size, config.model.attention = 512, "sdpa"
        config.model.n_layers, config.recurrence.steps = LAYERS, Schedule.constant(2)
        config.training.local_batch_size = 1
        config.compile = LoopCompileConfig(enable=False)
    return config


def recipe_of(*configs: LoopTrainer.Config) -> Recipe:
    stages = [
        Stage(name=name, config=config) for name, config in zip("abcd", configs, strict=False)
    ]
    return Recipe(name="tiny", stages=stages)


def rehearsed(config: LoopTrainer.Config, cluster: Cluster = EIGHT) -> Rehearsed:
    (found,) = rehearse(recipe_needs(recipe_of(config), cluster), cluster, anew=True)
    return found


def step_of(config: LoopTrainer.Config, cluster: Cluster = EIGHT) -> MeasuredStep:
    found = rehearsed(config, cluster)
    assert found.measured is not None, found.fault
    return found.measured


def assert_every_weight_is_reduced_once(
    config: LoopTrainer.Config,
) -> tuple[StageNeeds, MeasuredStep]:
    """In a micro-batch, however often it is visited; and states and held layers are in the peak."""
    (needs,), measured, ranks = recipe_needs(recipe_of(config), EIGHT), step_of(config), EIGHT.ranks
    padded = ranks * sum(size.shard(ranks) for size in needs.units)
    received = measured.micro_batches * 4 * padded * (1 - 1 / ranks)
    assert measured.moved["reduce-scatter"].received_bytes == pytest.approx(received, rel=1e-6)
    held = 2 * sum(size.parameters() for size in needs.units if size.unit.is_looped)
    assert measured.peak_bytes > needs.states.total + held
    return needs, measured


def test_a_compiled_layer_with_flex_on_a_shared_window_is_assembled():
    """Flex, selective checkpointing, FSDP in bf16 and the gather of keys, in one full graph."""
    config = stage(context_parallel=2)
    config.model.attention, config.model.n_layers = "flex", 1
    config.recurrence.steps = Schedule.constant(1)
    config.activation_checkpoint = SelectiveAC.Config()
    config.compile = LoopCompileConfig(enable=True)
    counters.clear()
    measured = step_of(config)
    assert measured.micro_batches == 2
    assert measured.moved.keys() == {"all-gather", "reduce-scatter"}
    assert counters["stats"]["unique_graphs"] >= 1
    # What this process compiles next has the CPU's kernels again.
    weight = torch.ones(4, requires_grad=True)
    norm = torch.compile(lambda x: F.rms_norm(x, (4,), weight), backend="aot_eager")
    norm(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((4,), 2.0))


def test_collectives_of_a_step_are_those_that_gloo_counts():
    """The formula is that of `tests/distributed/test_collectives.py`."""
    config, steps, policy = stage(), 3, "per_visit"
    config.fsdp.policy = policy
    config.recurrence.steps = Schedule.constant(steps)
    config.batch.global_batch_tokens = Schedule.constant(4 * EIGHT.ranks * SEQ_LEN)
    config.total_tokens = 8 * 4 * EIGHT.ranks * SEQ_LEN
    measured = step_of(config)
    for micro_batches, moved in ((2, measured.moved), (4, measured.moved_in(4))):
        counts = moved["all-gather"].count, moved["reduce-scatter"].count
        expected = expected_counts(policy, steps, micro_batches, hsdp=False, layers=LAYERS)
        assert counts == expected[:2]
    once, again = measured.moved["reduce-scatter"], measured.moved_again["reduce-scatter"]
    assert once.received_bytes == 2 * again.received_bytes


def test_stages_that_differ_in_values_alone_are_rehearsed_once(monkeypatch):
    def measure(needs: StageNeeds, *_: object) -> MeasuredStep:
        moved = {"all-gather": Moved(3, 4.5)}
        return MeasuredStep(micro_batches=1, moved=moved, peak_bytes=len(needs.name))

    monkeypatch.setattr(rehearsal, "_rehearse", measure)
    first, alike, deeper, unregularised = (stage() for _ in range(4))
    alike.debug.seed, alike.learning_rate = 7, Schedule.constant(1e-5)
    deeper.recurrence.steps = Schedule.constant(3)
    unregularised.adamw.weight_decay = 0.0
    planned = recipe_needs(recipe_of(first, alike, deeper, unregularised), EIGHT)
    found = list(rehearse(planned, EIGHT, anew=True))
    assert [one.like for one in found] == ["", "as a", "", ""]
    assert found[1].needs.name == "b"
    assert found[1].measured is found[0].measured
    assert "as a" in rehearsal_lines(found, EIGHT)[2]
    assert not any("compile.graphs" in line for line in rehearsal_lines(found, EIGHT))
    deeper.compile.graphs = True
    assert any("compile.graphs" in line for line in rehearsal_lines(found, EIGHT))


def test_a_second_plan_reads_the_first_and_another_assembly_does_not(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assembled: list[str] = []

    def measure(needs: StageNeeds, *_: object) -> MeasuredStep:
        assembled.append(needs.name)
        moved = {"all-gather": Moved(3, 4.5)}
        return MeasuredStep(micro_batches=1, moved=moved, peak_bytes=2.5, checkpoint_bytes=6)

    monkeypatch.setattr(rehearsal, "_rehearse", measure)

    def plan(*configs: LoopTrainer.Config, ranks: Cluster = EIGHT, **options: bool) -> list[str]:
        assembled.clear()
        found = list(rehearse(recipe_needs(recipe_of(*configs), ranks), ranks, **options))
        assert all(one.measured == found[0].measured for one in found)
        return [*assembled]

    seeded, deeper = stage(), stage()
    seeded.debug.seed = 7
    deeper.recurrence.steps = Schedule.constant(3)
    assert plan(stage()) == ["a"]
    assert plan(stage()) == plan(seeded) == []
    assert plan(stage(), deeper) == ["b"]
    placed = recipe_of(stage(), deeper)  # as `slurm submit` has it
    placed.stages[1].parent = "a"
    placed.place(str(tmp_path / "runs"))
    for needs in recipe_needs(placed, EIGHT):
        assert known_peak_bytes(needs, EIGHT) == 2.5
    assert plan(stage(), ranks=replace(EIGHT, nodes=1)) == ["a"]
    assert plan(stage(), anew=True) == ["a"]
    for file in tmp_path.iterdir():
        file.write_text("{")
    assert plan(stage()) == ["a"]
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert plan(stage()) == plan(stage()) == ["a"]


def test_hsdp_sums_over_replicas_and_muon_exchanges_twice_a_step():
    config = stage(tensor_parallel=2, data_parallel_replicate=2)
    config.optimizer.name, config.model.n_layers = "muon", 1
    config.checkpoint.carry.parent, config.recurrence.backward_steps = "runs/lm", 1
    (needs,), measured = recipe_needs(recipe_of(config), EIGHT), step_of(config)
    assert measured.moved["all-to-all"].count == measured.moved_in(4)["all-to-all"].count == 2
    reductions = measured.micro_batches * len(needs.units)  # one more over the replicas for each
    assert measured.moved["all-reduce"].count >= reductions


def test_offloaded_weights_with_an_average_are_assembled():
    config = stage()
    config.training.enable_cpu_offload, config.checkpoint.enable = True, False
    config.ema.decay = 0.9
    needs, measured = assert_every_weight_is_reduced_once(config)
    on_host = needs.states.parameters + needs.states.optimizer
    assert gpu_peak_bytes(needs, measured) == measured.peak_bytes - on_host > 0
    assert measured.checkpoint_bytes == 0


def test_what_breaks_is_one_line_and_leaves_no_trace():
    new_group, resize = dist.new_group, torch.UntypedStorage.resize_
    config = stage()
    config.model.attention = "varlen"
    found = rehearsed(config)
    assert found.fault == "aten.nonzero.default needs values, which fake tensors do not have"
    assert f"a: not assembled: {found.fault}" in rehearsal_lines([found], EIGHT)
    assert dist.new_group is new_group
    assert torch.UntypedStorage.resize_ is resize
    assert "pin_memory" not in vars(torch.Tensor)
    assert compat.device_type() == "cpu"


SMALL = (
    *("plan", "ouro_1_4b", "--stage", "1a", "--gpus-per-node", "8", "--model.size", "debugmodel"),
    *("--training.seq-len", "64", "--batch.global-batch-tokens", "1024", "--compile.no-enable"),
    *("--batch.multiple-of-windows", "8", "--recurrence.steps", "2"),
    *("--model.attention", "sdpa", "--model.n-layers", "1"),
)


def test_the_command_measures_once_and_says_what_it_cannot(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assembled: list[MeasuredStep] = []
    real = rehearsal._rehearse

    def measure(*arguments: Any) -> MeasuredStep:
        assembled.append(assembled[0] if assembled else real(*arguments))
        return assembled[-1]

    monkeypatch.setattr(rehearsal, "_rehearse", measure)
    assert main([*SMALL]) == 0
    first = capsys.readouterr().out
    assert "rehearsed as rank 0 of 8" in first
    rows = {line[:29].strip(): line[29:].split() for line in first.splitlines()}
    assert rows["micro-batches"] == ["2", "of", "2"]
    assert main([*SMALL]) == 0
    second = capsys.readouterr()
    assert "measured before" in second.out
    assert "assembled" not in second.out + second.err
    assert rows["GiB of a GPU, peak"][0] in second.out
    assert len(assembled) == 1
    assert main([*SMALL, "--rehearse"]) == 0
    assert len(assembled) == 2
    assert "measured before" not in capsys.readouterr().out


def test_more_ranks_than_windows_are_refused_before_anything_is_assembled(capsys):
    flags = ["--stage", "53m-r1", "--nodes", "64", "--rehearse"]
    assert main(["plan", "ouro_scaling_study", *flags]) == 2
    said = capsys.readouterr()
    assert "rehearsed" not in said.out
    (line,) = said.err.splitlines()
    assert "a global batch of 128 windows does not divide" in line
    assert (
        "512 data-parallel ranks; use --batch.global-batch-tokens of multiples of 2,097,152" in line
    )


def test_one_gpu_exchanges_nothing_and_holds_what_it_trains():
    one, config = Cluster(nodes=1, gpus_per_node=1, gpu=EIGHT.gpu, mfu=0.4), stage()
    config.recurrence.steps = Schedule.constant(1)
    step, (needs,) = step_of(config, one), recipe_needs(recipe_of(config), one)
    assert not any(moved.count for moved in step.moved.values())
    casts = needs.states.parameters / 2  # in bf16
    states = needs.states.parameters + needs.states.gradients + needs.states.optimizer
    assert states + casts < step.peak_bytes
