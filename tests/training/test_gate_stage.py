"""Stage II: the gate trains, nothing else moves by a bit, in one process and on two ranks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import titan_loop.compat as compat
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.support.tiny import (
    BATCH_WINDOWS,
    act_as_launched,
    standard_library_texts,
    tiny_config,
    train_run,
)
from tests.training.records import assert_same_records
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
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


def build(config: LoopTrainer.Config) -> LoopTrainer:
    compat.start_runtime()
    return LoopTrainer(resolve(config, 1))


def whole_parameters(trainer: LoopTrainer) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("variant", ["fp32", "bf16", "checkpointing", "tied"])
def test_only_the_gate_trains(source, tmp_path, variant):
    """bf16 puts even one process under FSDP, where frozen and trained parameters share a unit."""
    config = gate_config(source, tmp_path / "run", look_ahead=variant == "tied")
    config.checkpoint.enable = False
    if variant == "bf16":
        config.training.mixed_precision_param = "bfloat16"
    if variant == "checkpointing":
        config.activation_checkpoint = FullAC.Config()
    config.model.tie_weights = variant == "tied"
    trainer = build(config)
    outputs = []
    trainer.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    before = whole_parameters(trainer)
    trainer.train()
    trainer.close()
    assert changed(before, whole_parameters(trainer)) == GATE
    for output in outputs:
        assert not any(hidden.requires_grad for hidden in output.hidden_RBLD)
        assert all(logit.requires_grad for logit in output.exit_logit_RBL)
        assert all(logit.dtype == torch.float32 for logit in output.exit_logit_RBL)
    (optimizer,) = trainer.optimizers
    assert (
        sum(len(group["params"]) for group in optimizer.param_groups) == len(optimizer.state) == 2
    )
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


@pytest.mark.usefixtures("alone")
def test_the_metrics_of_a_step(source, tmp_path):
    train_run(gate_config(source, tmp_path / "run"))
    for record in RunDirectory(tmp_path / "run").read_metrics():
        steps = record["recurrent_steps"]
        pairs = range(2, steps + 1)
        assert record["loss"] == pytest.approx(
            sum(record[f"gate/bce_{r}"] for r in pairs) / steps, rel=1e-5
        )
        for r in pairs:
            # The mean of max(0, x) is at least max(0, mean of x).
            drop = record[f"ce/step_{r - 1}"] - record[f"ce/step_{r}"]
            assert record[f"improvement/step_{r}"] >= max(0.0, drop) - 1e-6
            assert 0.437 < record[f"gate/target_{r}"] < 1
        assert 1 < record["exit/mean_step"] < steps
        assert f"gate/bce_{steps + 1}" not in record
        assert record["entropy_weight"] == 0


@pytest.mark.usefixtures("alone")
def test_a_stage_two_after_stage_one_keeps_every_bit_of_the_language_model(source, tmp_path):
    first = tiny_config(source, tmp_path / "unused", steps=2)
    second = gate_config(source, tmp_path / "unused")
    second.checkpoint.carry.optimizer = False
    recipe = Recipe(
        name="two",
        folder=str(tmp_path),
        stages=[Stage(name="lm", config=first), Stage(name="gate", parent="lm", config=second)],
    )
    run_recipe(recipe)
    parent = CheckpointReader(tmp_path / "lm" / "checkpoints" / "step-2")
    trained = CheckpointReader(tmp_path / "gate" / "checkpoints" / f"step-{STEPS}")
    model = [key for key in parent.tensor_keys() if not key.startswith("optimizer.")]
    assert [key for key in trained.tensor_keys() if not key.startswith("optimizer.")] == model
    differing = {key for key in model if not torch.equal(parent.read(key), trained.read(key))}
    assert differing == GATE
    # The checkpoint is complete, and all of its optimiser is the gate's.
    saved = trained.keys()
    states = {key for key in trained.tensor_keys() if key.startswith("optimizer.")}
    assert {f"optimizer.state.{name}.exp_avg" for name in GATE} <= states
    assert all(".exit_gate." in key for key in saved if key.startswith("optimizer."))


@pytest.mark.usefixtures("alone")
def test_moments_of_other_parameters_are_refused_before_anything_starts(source, tmp_path):
    first = tiny_config(source, tmp_path / "unused", steps=2)
    second = gate_config(source, tmp_path / "unused")
    recipe = Recipe(
        name="two",
        folder=str(tmp_path),
        stages=[Stage(name="lm", config=first), Stage(name="gate", parent="lm", config=second)],
    )
    with pytest.raises(UserError, match=r"stage gate: checkpoint\.carry\.optimizer=True, but lm"):
        run_recipe(recipe)
    assert not (tmp_path / "lm").exists()
    # Nor does a run turn into a gate stage halfway.
    train_run(tiny_config(source, tmp_path / "run", steps=2))
    with pytest.raises(UserError, match="entries are not wanted"):
        train_run(gate_config(source, tmp_path / "run"))


@pytest.mark.usefixtures("alone")
def test_an_interrupted_gate_stage_continues_bitwise(source, tmp_path):
    train_run(gate_config(source, tmp_path / "whole"))
    half = gate_config(source, tmp_path / "broken")
    half.training.steps = 2
    train_run(half)
    train_run(gate_config(source, tmp_path / "broken"))
    one, other = (
        CheckpointReader(tmp_path / name / "checkpoints" / f"step-{STEPS}")
        for name in ("whole", "broken")
    )
    assert one.tensor_keys() == other.tensor_keys()
    for key in one.tensor_keys():
        assert torch.equal(one.read(key), other.read(key)), key


@pytest.fixture(scope="module")
def easy_and_hard(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the text is one phrase repeated, on which further steps soon gain nothing."""
    folder = tmp_path_factory.mktemp("kinds")
    hard = standard_library_texts(24)
    easy = ["tick tock " * (len(text) // 10) for text in hard]
    lines = [json.dumps({"id": str(i), "text": text}) for i, text in enumerate([*hard, *easy])]
    (folder / "raw.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = source.parent / "tokenizer.json"
    tokenize_source(folder / "raw.jsonl", output=folder / "source", tokenizer=tokenizer)
    return folder / "source"


@torch.no_grad()
def continuation_by_kind(trainer: LoopTrainer) -> dict[str, float]:
    """Return the mean of 1 − λ_2 over windows of repeated and of other text."""
    kinds: dict[str, list[float]] = {"easy": [], "hard": []}
    for inputs, labels in trainer.dataloader.read_step(32):
        output = trainer.model(inputs["input"], inputs["positions"], recurrent_steps=2)
        for label_L, logit_L in zip(labels, output.exit_logit_RBL[1], strict=True):
            kind = "easy" if len(label_L.unique()) < 10 else "hard"
            kinds[kind].append(float(torch.sigmoid(-logit_L).mean()))
    assert min(map(len, kinds.values())) >= 4
    return {kind: sum(values) / len(values) for kind, values in kinds.items()}


@pytest.mark.usefixtures("alone")
def test_the_gate_of_a_real_run_learns_where_steps_improve(easy_and_hard, tmp_path):
    """After Stage I at R = 2, Stage II goes on where the second step gains and leaves elsewhere."""

    def config(name: str, steps: int) -> LoopTrainer.Config:
        result = tiny_config(easy_and_hard, tmp_path / name, steps=steps)
        result.recurrence.steps = Schedule.constant(2)
        result.training.local_batch_size = BATCH_WINDOWS
        result.checkpoint.enable = False
        result.metrics.log_freq = steps
        return result

    language_model = build(config("lm", 60))
    language_model.train()
    language_model.close()
    stage_two = config("gate", 60)
    stage_two.trainable = "exit_gate"
    stage_two.loss = AdaptiveGateLoss.Config()
    stage_two.learning_rate = Schedule.constant(0.03)
    gate = build(stage_two)
    gate.model.load_state_dict(language_model.model.state_dict())
    before = continuation_by_kind(gate)
    gate.train()
    gate.close()
    after = continuation_by_kind(gate)
    # Measured on six choices of modules: hard minus easy is between -0.14 and -0.04 after Stage I
    # and between 0.14 and 0.26 after Stage II.
    before_gap, after_gap = (kinds["hard"] - kinds["easy"] for kinds in (before, after))
    assert after_gap > 0.05
    assert after_gap - before_gap > 0.1
    records = RunDirectory(tmp_path / "gate").read_metrics()
    assert records[-1]["gate/bce_2"] < records[0]["gate/bce_2"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no gate": ({"model.exit_gate": False}, r"needs a gate, and model\.exit_gate=False"),
    "another loss": ({"loss": None}, r"trainable=exit_gate with loss=ExpectedExitLoss\.Config"),
    "gate loss for all": ({"trainable": "all"}, r"trainable=all with loss=AdaptiveGateLoss"),
    "unknown": ({"trainable": "gate"}, r"trainable=gate: choose all or exit_gate"),
    "one step": (
        {"recurrence.steps": Schedule.steps([(0, 4), (100, 1)])},
        r"recurrence\.steps: R can be 1, ",
    ),
    "one step by chance": ({"recurrence.poisson": True}, r"R can be 1, .*min_steps=2"),
    "slope": ({"loss.slope": 0.0}, r"loss\.slope=0\.0 must be positive"),
    "threshold": ({"loss.threshold": -1.0}, r"loss\.threshold=-1\.0 must not be negative"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_clear_line(tmp_path, case):
    changes, message = BAD[case]
    config = gate_config(Path("unused"), tmp_path / "run")
    config.dataloader = TaskLoader.Config(task=Mano(max_operations=3))
    for path, value in changes.items():
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        default = LoopTrainer.Config().loss if path == "loss" else value
        setattr(target, name, default)
    with pytest.raises(UserError, match=message) as caught:
        resolve(config, 1)
    assert "\n" not in str(caught.value)


# Two ranks


def train_gate(
    source: Path, run: Path, world: int, changes: dict[str, Any]
) -> tuple[set[str], list[str], dict[str, Tensor]]:
    """Train as a launcher's rank; return what changed, what got gradients, and the gate."""
    act_as_launched(world)
    config = gate_config(source, run, look_ahead=changes.get("look_ahead", False))
    config.parallelism.tensor_parallel_degree = changes.get("tp", 1)
    config.training.local_batch_size *= changes.get("tp", 1)
    if world > 1:
        config.parallelism.spmd_backend = BACKEND
    if changes.get("hold"):
        config.fsdp.policy, config.fsdp.fp32_visit_sum = "per_step", True
    trainer = LoopTrainer(resolve(config, world))
    before = whole_parameters(trainer)
    real_step = trainer.optimizers.step
    with_gradient: list[str] = []

    def step() -> None:
        named = trainer.model.named_parameters()
        with_gradient.extend(name for name, p in named if p.grad is not None)
        real_step()

    trainer.optimizers.step = step
    trainer.train()
    after = whole_parameters(trainer)
    trainer.close()
    return changed(before, after), with_gradient, {name: after[name] for name in GATE}


LAYOUTS = {"dp2": {}, "dp2-hold": {"hold": True}, "tp2": {"tp": 2}}


@pytest.fixture(scope="module")
def one_process(source, tmp_path_factory, gloo_pool) -> tuple[Path, dict[str, Tensor]]:
    """The run of one process, and its gate."""
    run = tmp_path_factory.mktemp("one")
    ((_, _, gate),) = gloo_pool(1).run(train_gate, source, run, 1, {})
    return run, gate


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_gate_of_one_process(gloo_pool, one_process, source, tmp_path, layout):
    one, expected = one_process
    ranks = gloo_pool(2).run(train_gate, source, tmp_path, 2, LAYOUTS[layout])
    for moved, with_gradient, gate in ranks:
        assert moved == GATE
        assert set(with_gradient) == GATE
        for name, value in gate.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=GATE_TOLERANCE)
    records, expected_records = (RunDirectory(run).read_metrics() for run in (tmp_path, one))
    assert_same_records(records, expected_records)
