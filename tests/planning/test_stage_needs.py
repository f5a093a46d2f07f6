"""`titan-loop plan`: the arithmetic of a stage against formulas written out here, and refusals."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC

from titan_loop.cli.main import main
from titan_loop.distributed.devices import DEVICES
from titan_loop.distributed.memory import USABLE_SHARE
from titan_loop.models.family import decoder_config
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.stage_needs import StageNeeds, stage_needs
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.registry import load_recipe
from titan_loop.testing.tiny import tiny_config
from titan_loop.training.schedule import Schedule

H100 = DEVICES["h100-80gb"]
D, FFN, LAYERS, VOCABULARY, WINDOW = 2048, 5632, 24, 49_152, 4096
MOST_PLANNED = 0.85  # of the usable memory; the estimate was 13 % off at most
OURO = Cluster(nodes=64, gpus_per_node=8, gpu=H100, mfu=0.4)


def needs_of(stage: str, cluster: Cluster = OURO) -> StageNeeds:
    config = load_recipe("ouro_1_4b").stage(stage).config
    return stage_needs(stage, config, cluster)


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


@pytest.mark.parametrize("recipe", ["ouro_1_4b", "ouro_2_6b", "ouro_scaling_study"])
def test_ouro_leaves_more_room_than_the_estimate_may_be_off(recipe):
    cluster = replace(OURO, nodes=8)
    for stage in load_recipe(recipe).stages:
        needs = stage_needs(stage.name, stage.config, cluster)
        assert needs.memory.peak <= MOST_PLANNED * USABLE_SHARE * H100.memory_bytes, stage.name


def test_fp32_takes_as_long_as_its_own_peak_says(capsys):
    flags = ["plan", "ouro_1_4b", "--stage", "1b", "--nodes", "64"]
    assert main([*flags, "--training.mixed-precision-param", "float32"]) == 0
    assert "fp32 compute, fp32 masters and AdamW, 40% MFU of 67 TFLOP/s" in capsys.readouterr().out
    days = {
        size: stage_needs(
            "1b", load_recipe("ouro_1_4b").stage("1b").config, replace(OURO, compute_bytes=size)
        ).gpu_days
        for size in (2, 4)
    }
    assert days[4] == pytest.approx(days[2] * 989 / 67)


def test_r_doubles_what_is_visited_but_not_the_weights():
    first, second = needs_of("1a"), needs_of("1b")  # R = 8 and 4
    assert first.units == second.units
    assert first.flops_per_token == tuple(2 * part for part in second.flops_per_token)
    assert first.activations["none"] == 2 * second.activations["none"]
    assert first.memory.unsharded_gradients == second.memory.unsharded_gradients


def test_a_random_and_a_scheduled_r_count_with_their_mean():
    config = tiny_config(Path("nowhere"), Path("run"))
    total = config.total_tokens
    config.recurrence.steps = Schedule.steps([(0, 8), (total // 4, 2)])
    one = Cluster(nodes=1, gpus_per_node=1, gpu=H100, mfu=0.5)
    assert stage_needs("x", config, one).mean_recurrent_steps == pytest.approx(3.5, abs=2e-3)
    config.recurrence.poisson = True
    assert stage_needs("x", config, one).shape.recurrent_steps > 8


def test_limits_of_r_and_steps_without_backward_count():
    config = load_recipe("ouro_1_4b").stage("1a").config  # R = 8
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


def test_context_parallelism_shares_windows_and_their_activations():
    needs = needs_of("longct")
    assert needs.shape.context_parallel_degree == 4
    assert needs.data_parallel_ranks == 128
    assert needs.shape.tokens == 65_536 / 4
    moved = {entry.what for entry in needs.traffic}
    assert "keys, values" in moved


def test_layer_bytes_under_per_step_do_not_depend_on_r():
    received = {}
    for policy in ("per_visit", "per_step"):
        config = load_recipe("ouro_1_4b").stage("ct_annealing").config
        config.fsdp.policy = policy
        needs = stage_needs("x", config, OURO)
        received[policy] = sum(
            t.received_bytes for t in needs.traffic if (t.kind, t.what) == ("all-gather", "layers")
        )
    assert received["per_visit"] == pytest.approx(2 * 4 * received["per_step"])


@pytest.mark.parametrize(
    ("gpu", "changes", "policy"),
    [
        (H100, {}, "per_step"),
        (replace(H100, memory_bytes=2**30), {}, "per_visit"),
        (H100, {"parallelism.fsdp_reshard_after_forward": "always"}, "per_visit"),
        (H100, {"fsdp.policy": "per_visit"}, "per_visit"),
    ],
)
def test_layers_are_held_by_default_where_it_fits(gpu, changes, policy):
    config = load_recipe("ouro_1_4b").stage("ct_annealing").config
    for path, value in changes.items():
        section, field = path.split(".")
        setattr(getattr(config, section), field, value)
    assert stage_needs("x", config, replace(OURO, gpu=gpu)).policy == policy


def test_offloaded_parameters_leave_the_gpu_and_may_let_layers_be_held():
    config = load_recipe("ouro_1_4b").stage("ct_annealing").config
    before = stage_needs("x", config, replace(OURO, nodes=1)).memory
    little = replace(H100, memory_bytes=before.transient_peak + before.persistent / 2)
    cluster = replace(OURO, nodes=1, gpu=little)
    assert stage_needs("x", config, cluster).policy == "per_visit"
    config.training.enable_cpu_offload = True
    offloaded = stage_needs("x", config, cluster)
    assert (offloaded.policy, offloaded.memory.persistent) == ("per_step", 0)
    assert offloaded.memory.offloaded == before.persistent
    assert offloaded.memory.peak == before.transient_peak


def test_units_that_never_reshard_are_gathered_once_and_all_there():
    config = load_recipe("ouro_1_4b").stage("1b").config  # R = 4
    config.fsdp.policy = "per_visit"
    default = stage_needs("x", config, OURO)
    config.parallelism.fsdp_reshard_after_forward = "never"
    never = stage_needs("x", config, OURO)
    per_pass = LAYERS * 4 * 4  # R visits, 4 micro-batches
    counts = [next(t.count for t in n.traffic if t.what == "layers") for n in (default, never)]
    assert counts == [2 * per_pass, per_pass]  # forward and backward; backward but for visit R
    layer = next(u for u in never.units if u.unit.name == "layers").parameters()
    layers, embedding = layer * LAYERS, D * VOCABULARY
    held = never.memory.gathered - never.memory.gathered_later
    assert held == 2 * (layers - 3 * layer)
    assert never.memory.gathered_later - default.memory.gathered == 2 * embedding


def test_the_table_of_ouro_on_64_nodes(capsys):
    assert main(["plan", "ouro_1_4b", "--nodes", "64"]) == 0
    out = capsys.readouterr().out
    assert "512 GPUs (64 nodes × 8 h100-80gb), bf16 compute" in out
    rows = {line[:34].strip(): line[34:].split() for line in out.splitlines()}
    assert rows["stage"][:2] == ["1a", "1b"]
    assert len(rows["parameters"]) == 7
    assert rows["FSDP policy"] == ["per_step"] * 7
    assert rows["global batch, windows"][0] == "1,024–2,048"
    for name in ("parameters kept gathered", "gradients, unsharded", "optimiser", "readout chunk"):
        assert len(rows[name]) == 7
    assert "refused" not in out


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--nodes", "3"], "windows does not divide by local_batch_size=1 × 24 data-parallel"),
        (["--stage", "1b", "--nodes", "3"], "use --batch.global-batch-tokens "),
        (["--stage", "1b", "--parallelism.tensor-parallel-degree", "0"], "degree=0 must divide"),
        (["--stage", "1b", "--parallelism.context-parallel-degree", "0"], "must be at least 1"),
        (["--stage", "1b", "--parallelism.data-parallel-replicate-degree", "0"], "do not factor"),
        (["--stage", "1b", "--training.local-batch-size", "0"], "local_batch_size=0 must be at"),
        (["--stage", "1b", "--total-tokens", "0"], "total_tokens=0 must be at least 1"),
        (
            ["--stage", "1b", "--gpus-per-node", "1", "--gpu", "a100-40gb", "--model.size", "2.6b"],
            "use more GPUs",
        ),
        (["--stage", "longct", "--nodes", "64", "activation-checkpoint:none"], "GiB of 71 usable"),
        (
            ["--stage", "1a", "--gpu", "a100-40gb", "activation-checkpoint:none"],
            "use activation-checkpoint:selective",
        ),
        (
            ["--stage", "longct", "--nodes", "64", "--parallelism.context-parallel-degree", "1"],
            ", or --parallelism.context-parallel-degree 4",
        ),
        (["--stage", "1a", "--recurrence.backward-steps", "2"], "1a: recurrence.backward_steps=2"),
        (
            ["--stage", "1a", "--training.no-disable-cuda-graphs"],
            "1a: training.disable_cuda_graphs",
        ),
        (["--stage", "gate", "--trainable", "all"], "gate: trainable=all with loss=AdaptiveGate"),
        (["--stages.1b.model.n-layers", "36"], "1b: the parent"),
        (["--stages.1b.checkpoint.carry.upcycle", "stacked"], "1b: layers=24 is not a multiple"),
        (
            ["--stages.gate.checkpoint.carry.optimizer"],
            "gate: checkpoint.carry.optimizer=True, but",
        ),
        (["--stage", "1b", "--suite.interval", "-1"], "1b: suite.interval=-1 is negative"),
        (["--stage", "1b", "--held-out.windows", "0"], "1b: held_out.windows=0 must be at least"),
        (["--stage", "1b", "--suite.depths", "0", "--suite.interval", "9"], "1b: suite.depths=[0]"),
        (
            ["--stage", "1b", "--suite.tasks", "mnao", "--suite.interval", "9"],
            "1b: suite.tasks: mnao",
        ),
        (
            ["--stage", "1b", "--training.global-batch-size", "8"],
            "--training.global-batch-size has no effect",
        ),
        (["--parallelism.tensor-parallel-degree", "3"], "must divide model.n_heads=16"),
        (["--stage", "1b", "--nodes", "0"], "--nodes 0 must be at least 1"),
        (["--mfu", "2"], "--mfu 2.0 must be above 0"),
        (["--mfu", "most"], "could not convert string to float: 'most'"),
        (["--gpu", "h100"], "--gpu h100 is unknown; nearest: h100-80gb"),
        (["--stage", "1c"], "has no stage '1c'"),
        (["--stages.1b.training.mixed_precision_param=float32"], "all stages in one precision"),
    ],
)
def test_refusals_end_with_code_2_and_name_a_fix(capsys, flags, refusal):
    assert main(["plan", "ouro_1_4b", *flags]) == 2
    printed = capsys.readouterr()
    assert refusal in printed.out + printed.err
    assert len(printed.err.splitlines()) == 1


def test_checkpointing_is_a_flag_and_makes_room(capsys):
    flags = ["plan", "ouro_2_6b", "--stage", "1b", "--gpu", "a100-40gb", "--nodes", "64"]
    assert main([*flags, "activation-checkpoint:none"]) == 2
    assert main([*flags, "activation-checkpoint:full"]) == 0
    assert main([*flags, "activation-checkpoint:recurrent-step"]) == 0
    assert "recurrent-step\n" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["full", "recurrent-step"])
def test_a_star_marks_the_stages_own_checkpointing(capsys, policy):
    assert main(["plan", "ouro_1_4b", "--nodes", "64", f"activation-checkpoint:{policy}"]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = [line for line in table if line.startswith("  activations, ")]
    assert len(rows) > 2
    (starred,) = (line for line in rows if "*" in line)
    assert starred.startswith(f"  activations, {policy} ")
    assert starred.count("*") == 7


def test_a_plan_of_a_stage_after_a_parent_takes_its_weights_to_be_trained():
    flags = ["--recurrence.backward-steps", "2"]
    assert main(["plan", "ouro_1_4b", "--nodes", "64", "--stage", "1b", *flags]) == 0


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


def test_memory_is_that_of_the_config_s_policy():
    config = load_recipe("ouro_1_4b").stage("1b").config
    config.activation_checkpoint = FullAC.Config()
    needs = stage_needs("1b", config, OURO)
    assert needs.memory.activations == needs.activations["full"]
    kept = needs.activations
    assert kept["none"] > kept["selective"] > kept["full"]
