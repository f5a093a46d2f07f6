"""`titan-loop plan`: the arithmetic of a stage against formulas written out here, and refusals."""

import re
from pathlib import Path

import pytest
import titan_loop.compat as compat  # before any torchtitan module
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.support.tiny import tiny_config
from titan_loop.cli.main import main
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.distributed.devices import DEVICES, USABLE_SHARE
from titan_loop.models.family import decoder_config
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.stage_needs import StageNeeds, memory_refusal, stage_needs
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

H100 = DEVICES["h100-80gb"]
D, FFN, LAYERS, VOCABULARY, WINDOW = 2048, 5632, 24, 49_152, 4096
OURO = Cluster(nodes=64, gpus_per_node=8, gpu=H100, mfu=0.4)


def config_of(stage: str) -> LoopTrainer.Config:
    with compat.assuming("cuda"):
        return load_recipe("ouro_1_4b").stage(stage).config


def needs_of(stage: str, cluster: Cluster = OURO) -> StageNeeds:
    return stage_needs(stage, config_of(stage), cluster)


def test_flops_steps_and_gpu_days_of_ouro_1b():
    needs = needs_of("1b")
    assert sum(unit.parameters() for unit in needs.units) == 1_434_652_673
    layer = 4 * D * D + 3 * D * FFN
    matrices = 6 * 4 * LAYERS * layer
    attention = 6 * 4 * LAYERS * 2 * D * WINDOW
    readouts = 6 * 4 * D * VOCABULARY
    flops = needs.flops_per_token
    assert flops.matrices == matrices
    assert flops.attention == attention
    assert flops.readouts == readouts
    assert flops.total == matrices + attention + readouts + 6 * 4 * D
    assert needs.steps == -(-3 * 10**12 // 2**23)
    assert needs.tokens == needs.steps * 2**23
    assert needs.accumulation == (4, 4)
    seconds = needs.tokens * flops.total / (989e12 * 0.4)
    assert needs.gpu_days == pytest.approx(seconds / 86_400)
    assert not needs.refusals


def test_a_random_and_a_scheduled_r_count_with_their_mean():
    config = tiny_config(Path("nowhere"), Path("run"))
    total = config.total_tokens
    config.recurrence.steps = Schedule.steps([(0, 8), (total // 4, 2)])
    one = Cluster(nodes=1, gpus_per_node=1, gpu=H100, mfu=0.5)
    assert stage_needs("x", config, one).mean_recurrent_steps == pytest.approx(3.5, abs=2e-3)
    config.recurrence.poisson = True
    assert stage_needs("x", config, one).recurrent_steps > 8


def test_limits_of_r_and_steps_without_backward_count():
    config = config_of("1a")  # R = 8
    config.recurrence.max_steps = 4
    needs = stage_needs("x", config, OURO)
    assert needs.mean_recurrent_steps == 4
    config.recurrence.backward_steps = 1
    truncated = stage_needs("x", config, OURO).flops_per_token
    for part, share in (("matrices", 1 / 2), ("attention", 1 / 2), ("readouts", 3 / 4)):
        whole = getattr(needs.flops_per_token, part)
        assert getattr(truncated, part) == pytest.approx(share * whole)
    model = decoder_config(config.model, max_seq_len=WINDOW)
    by_model = model.training_flops(WINDOW, 4, backward_steps=1)
    assert truncated == pytest.approx(by_model)


def test_the_table_of_ouro_on_64_nodes(capsys):
    assert main(["plan", "ouro_1_4b", "--nodes", "64", "--no-memory"]) == 0
    out = capsys.readouterr().out
    assert "512 GPUs (64 nodes × 8 h100-80gb), bf16 compute" in out
    rows = {line[:25].strip(): line[25:].split() for line in out.splitlines()}
    assert rows["stage"][:2] == ["1a", "1b"]
    assert len(rows["parameters"]) == 7
    assert rows["FSDP policy"] == ["per_step"] * 7
    assert rows["global batch, windows"][0] == "1,024–2,048"
    for name in ("parameters, sharded", "gradients, sharded", "optimiser"):
        assert len(rows[name]) == 7
    assert "refused" not in out


@pytest.mark.parametrize(
    ("checkpointing", "local_batch", "fix"),
    [
        (None, 1, "use activation-checkpoint:selective"),
        (FullAC.Config(), 1, "use activation-checkpoint:recurrent-step"),
        (RecurrentStepAC.Config(layers="full"), 2, "use a smaller --training.local-batch-size"),
        (RecurrentStepAC.Config(layers="full"), 1, "larger --parallelism.context-parallel-degree"),
    ],
)
def test_a_peak_that_does_not_fit_is_refused_with_the_next_saving(checkpointing, local_batch, fix):
    config = config_of("1b")
    config.activation_checkpoint = checkpointing
    config.training.local_batch_size = local_batch
    needs = stage_needs("1b", config, OURO)
    usable = USABLE_SHARE * H100.memory_bytes
    assert memory_refusal(needs, usable, H100) is None
    refusal = memory_refusal(needs, 80 * 2**30, H100)
    assert refusal is not None
    assert "a GPU would need 80 GiB of 71 usable" in refusal
    assert fix in refusal


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--nodes", "3"], "windows does not divide by local_batch_size=1 × 24 data-parallel"),
        (["--stage", "1b", "--nodes", "3"], "use --batch.global-batch-tokens "),
        (["--stage", "1b", "--parallelism.context-parallel-degree", "0"], "must be at least 1"),
        (["--stage", "1a", "--recurrence.backward-steps", "2"], "1a: recurrence.backward_steps=2"),
        (["--stage", "gate", "--trainable", "all"], "gate: trainable=all with loss=AdaptiveGate"),
        (["--stages.1b.checkpoint.carry.upcycle", "stacked"], "1b: layers=24 does not repeat"),
        (
            ["--stages.gate.checkpoint.carry.optimizer"],
            "gate: checkpoint.carry.optimizer=True, but",
        ),
        (["--stage", "1b", "--suite.interval", "-1"], "1b: suite.interval=-1 must be at least 0"),
        (
            ["--stage", "1b", "--suite.tasks", "mnao", "--suite.interval", "9"],
            "1b: suite.tasks: mnao",
        ),
        (["--stage", "1b", "--nodes", "0"], "--nodes=0 must be at least 1"),
        (["--mfu", "2"], "--mfu 2.0 must be above 0 and at most 1, such as 0.4"),
        (["--mfu", "most"], "--mfu=most is not a number; write it like 0.1 or 1e-4"),
        (["--gpu", "h100"], "--gpu h100 is unknown; nearest: h100-80gb"),
        (["--stage", "1c"], "has no stage '1c'"),
    ],
)
def test_refusals_end_with_code_2_and_name_a_fix(capsys, flags, refusal):
    assert main(["plan", "ouro_1_4b", "--no-memory", *flags]) == 2
    printed = capsys.readouterr()
    assert refusal in printed.out + printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_plan_of_a_stage_after_a_parent_takes_its_weights_to_be_trained():
    flags = ["--recurrence.backward-steps", "2"]
    flags += ["--nodes", "64", "--stage", "1b", "--no-memory"]
    assert main(["plan", "ouro_1_4b", *flags]) == 0


def test_too_little_data_is_refused_where_the_data_is_here(source, tmp_path):
    one = Cluster(nodes=1, gpus_per_node=1, gpu=H100, mfu=0.4)
    config = tiny_config(source, tmp_path)
    needs = stage_needs("x", config, one)
    assert (needs.data, needs.refusals) == ("enough", [])
    config.total_tokens = 10**9
    config.dataloader.max_epochs = 1  # pyright: ignore[reportAttributeAccessIssue]
    needs = stage_needs("x", config, one)
    assert needs.data == "too little"
    assert "raise max_epochs" in needs.refusals[0]


def test_data_read_too_often_is_refused_as_before_training(source, tmp_path):
    one = Cluster(nodes=1, gpus_per_node=1, gpu=H100, mfu=0.4)
    stages = [Stage(name=name, config=tiny_config(source, tmp_path)) for name in ("a", "b")]
    recipe = Recipe(name="two", stages=stages)
    config = stages[1].config
    config.total_tokens = 10**9
    (refusal,) = stage_needs("b", config, one, recipe=recipe).refusals
    assert re.search(r"=1000000000 reads source \d+\.\d times; .*--stages\.b\.dataloader", refusal)
