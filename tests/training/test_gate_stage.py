"""Stage II: the gate trains, nothing else moves by a bit, in one process and on two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import titan_loop.compat as compat
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.support.tiny import act_as_launched, tiny_config, train_run
from tests.training.records import assert_same_records
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.trainer import LoopTrainer

BACKEND = os.environ.get("TITAN_LOOP_TEST_SPMD_BACKEND", compat.SPMD_BACKEND)
STEPS = 4
GATE = {"exit_gate.weight", "exit_gate.bias"}
# The gate starts at 0 and has moved by 6e-3; measured 4e-8.
GATE_TOLERANCE = 1e-6


def gate_config(source: Path, run: Path, *, steps: int = STEPS, **loss: Any) -> LoopTrainer.Config:
    config = tiny_config(source, run, steps=steps)
    config.trainable = "exit_gate"
    config.loss = AdaptiveGateLoss.Config(**loss)
    return config


def whole_parameters(trainer: LoopTrainer) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.usefixtures("alone")
def test_only_the_gate_trains(source, tmp_path):
    """bf16 puts even one process under FSDP, where frozen and trained parameters share a unit."""
    config = gate_config(source, tmp_path / "run", steps=2)
    config.checkpoint.enable = False
    config.training.mixed_precision_param = "bfloat16"
    config.activation_checkpoint, config.model.tie_weights = FullAC.Config(), True
    compat.start_runtime()
    trainer = LoopTrainer(resolve(config, 1))
    outputs = []
    trainer.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    before = whole_parameters(trainer)
    trainer.train()
    trainer.close()
    assert changed(before, whole_parameters(trainer)) == GATE
    for output in outputs:
        assert not any(hidden.requires_grad for hidden in output.hidden_RBLD)
        assert all(logit.dtype == torch.float32 for logit in output.exit_logit_RBL)
    (optimizer,) = trainer.optimizers
    assert len(optimizer.state) == 2
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


@pytest.mark.usefixtures("alone")
def test_a_stage_two_after_stage_one_keeps_every_bit_of_the_language_model(source, tmp_path):
    def train(*, carries_moments: bool) -> None:
        second = gate_config(source, tmp_path / "unused")
        second.checkpoint.carry.optimizer = carries_moments
        first = Stage(name="lm", config=tiny_config(source, tmp_path / "unused", steps=2))
        stages = [first, Stage(name="gate", parent="lm", config=second)]
        run_recipe(Recipe(name="two", folder=str(tmp_path), stages=stages))

    with pytest.raises(UserError, match=r"stage gate: checkpoint\.carry\.optimizer=True, but lm"):
        train(carries_moments=True)
    assert not (tmp_path / "lm").exists()
    train(carries_moments=False)
    parent = CheckpointReader(tmp_path / "lm" / "checkpoints" / "step-2")
    trained = CheckpointReader(tmp_path / "gate" / "checkpoints" / f"step-{STEPS}")
    model = [key for key in parent.tensor_keys() if not key.startswith("optimizer.")]
    assert [key for key in trained.tensor_keys() if not key.startswith("optimizer.")] == model
    differing = {key for key in model if not torch.equal(parent.read(key), trained.read(key))}
    assert differing == GATE
    # The checkpoint is complete, and all of its optimiser is the gate's.
    states = {key for key in trained.keys() if key.startswith("optimizer.")}  # noqa: SIM118
    assert {f"optimizer.state.{name}.exp_avg" for name in GATE} <= states
    assert all(".exit_gate." in key for key in states)
    with pytest.raises(
        UserError, match="exit_gate cannot go on with the moments of all"
    ):  # nor halfway through a run
        train_run(gate_config(source, tmp_path / "lm"))


def train_gate(
    source: Path, run: Path, world: int, changes: dict[str, Any]
) -> tuple[set[str], dict[str, Tensor]]:
    """Train as a launcher's rank; return what changed, and the gate."""
    act_as_launched(world)
    config = gate_config(source, run)
    config.parallelism.tensor_parallel_degree = changes.get("tp", 1)
    config.training.local_batch_size *= changes.get("tp", 1)
    config.fsdp.policy = changes.get("policy", "auto")
    config.fsdp.fp32_visit_sum = changes.get("policy") == "per_step"
    if world > 1:
        config.parallelism.spmd_backend = BACKEND
    trainer = LoopTrainer(resolve(config, world))
    before = whole_parameters(trainer)
    trainer.train()
    after = whole_parameters(trainer)
    trainer.close()
    return changed(before, after), {name: after[name] for name in GATE}


LAYOUTS = {"dp2-hold": {"policy": "per_step"}, "tp2": {"tp": 2}}


@pytest.fixture(scope="module")
def one_process(source, tmp_path_factory, gloo_pool) -> tuple[Path, dict[str, Tensor]]:
    """The run of one process, and its gate."""
    run = tmp_path_factory.mktemp("one")
    ((_, gate),) = gloo_pool(1).run(train_gate, source, run, 1, {})
    return run, gate


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_gate_of_one_process(gloo_pool, one_process, source, tmp_path, layout):
    one, expected = one_process
    for moved, gate in gloo_pool(2).run(train_gate, source, tmp_path, 2, LAYOUTS[layout]):
        assert moved == GATE
        for name, value in gate.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=GATE_TOLERANCE)
    records, expected_records = (RunDirectory(run).read_metrics() for run in (tmp_path, one))
    assert_same_records(records, expected_records)
