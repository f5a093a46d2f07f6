"""Every mistake a user can make in a config: one line that names field, value and fix."""

import json
import shutil
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import pytest

from tests.support.tiny import BATCH_TOKENS, tiny_config
from titan_loop.checkpoint.manifest import write_manifest
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.source_card import CARD_NAME
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.models.dense import DenseOptions
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.recipes.on_disk import check_resumable
from titan_loop.storage.json_files import json_sha256
from titan_loop.training.chosen_model import newest_of
from titan_loop.training.preflight import remarks
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule

ONE = Schedule.constant(1)
MANO = TaskLoader.Config(task=Mano(max_operations=3))
GATE = {"trainable": "exit_gate", "loss": AdaptiveGateLoss.Config(), "dataloader": MANO}
MUON = {"optimizer.name": "muon"}
SPIKES = {"stability.skip_spikes": True, "checkpoint.keep_latest_k": 0}
TP, CP = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
BACKEND, BATCH = "parallelism.spmd_backend", "batch.global_batch_tokens"
HELD_OUT = {"held_out.interval": 1}

VALUES: list[tuple[str, Any, str]] = [
    ("model.size", "quikstart", r"model\.size=quikstart.*quickstart"),
    ("model.attention", "flex", "attention=flex needs CUDA"),
    ("model.vocab_size", 200, r"model\.vocab_size=200 is too small: the data's largest token is"),
    ("model.n_heads", 3, r"model\.n_heads=3 must divide model\.dim=64"),
    ("float8", "mxfp8", "float8=mxfp8 must be off or rowwise"),
    ("training.dtype", "bfloat16", r"training\.dtype=bfloat16 must be float32; others round"),
    ("training.steps", -1, r"training\.steps=-1 must be at least 0; 0 means no limit"),
    ("training.seq_len", 0, r"training\.seq_len=0 must be at least 1"),
    ("training.enable_cpu_offload", True, "=True moves weights off a GPU, and there is none"),
    ("training.disable_cuda_graphs", False, r"follow R and schedules; use --compile\.graphs"),
    ("compile.graphs", True, r"compile\.graphs=True replays CUDA graphs, and there is no CUDA"),
    ("training.global_batch_size", 64, "=64 must be -1; set --batch.global-batch-tokens"),
    ("training.local_batch_size", 3, r"8 windows does not divide by local_batch_size=3"),
    ("profiler.enable_memory_snapshot", True, "snapshot=True records CUDA allocations"),
    ("training.gc_debug", True, "gc_debug=True records CUDA allocations"),
    ("comm.mode", "fake_backend", r"comm\.mode=fake_backend"),
    ("trainable", "gate", "trainable=gate must be all or exit_gate"),
    ("optimizer.name", "lion", r"optimizer\.name=lion is unknown.*or muon"),
    ("loss", ExpectedExitLoss.Config(prior="geometric", geometric_eta=1.5), "geometric_eta=1.5"),
    ("loss", AdaptiveGateLoss.Config(), r"trainable=all with loss=AdaptiveGateLoss"),
    ("parallelism.data_parallel_shard_degree", 3, "do not factor the world size 1"),
    ("checkpoint.load_step", 2, "load_step=2 must be -1; the newest is loaded; delete newer ones"),
    ("metrics.save_for_all_ranks", True, "must be False; every metric is global"),
    ("parallelism.pipeline_parallel_degree", 2, "pipeline_parallel_degree=2 must be 1"),
    (BACKEND, "full_dtensor", "full_dtensor must be partial_dtensor or spmd_types; full_dten"),
    (BACKEND, "spmd_types", r"spmd_types needs torch 2\.15"),
    ("fsdp.policy", "per_stop", r"fsdp\.policy=per_stop must be per_visit or per_step or auto"),
    ("recurrence.backward_steps", 1, "=1 never reaches the embedding, .* R is 2 or more; set"),
    ("recurrence.backward_growth", ONE, "growth=1 never reaches the embedding, .* R is 2 or more"),
    ("loss", ExpectedExitLoss.Config(geometric_eta=0.3), r"=0\.3 has no effect with loss\.prior"),
    ("model", DenseOptions(rope_factor=8.0), r"rope_factor=8\.0 has no effect with .*scaling=none"),
    ("model", DenseOptions(rope_scaling="linear", rope_original=8), "original=8 has no effect"),
    (
        "model",
        DenseOptions(scale_embeddings=True, embedding_scale=2.0),
        r"embedding_scale=2\.0 has no effect with model\.scale_embeddings=True",
    ),
    ("model", DenseOptions(windowed_layers=(0,)), r"window=None must be set with .*windowed_la"),
    ("model", DenseOptions(qk_norm="all", norm_offset=True), "qk_norm=all does not work with mod"),
    (
        "model",
        DenseOptions(positions="none", window=8, window_rope_theta=1e4),
        r"window_rope_theta=10000\.0 has no effect with model\.positions=none",
    ),
    (
        "model",
        DenseOptions(positions="relative", relative_window=8, attention_softcap=30.0),
        r"attention_softcap=30\.0 does not work with model\.positions=relative.*; use rope",
    ),
    ("recurrence.steps", Schedule.constant(0), r"recurrence\.steps=0 must be at least 1"),
    ("recurrence.steps", Schedule.constant(2.5), "'2.5' is rounded to whole steps"),
    ("recurrence.from_data", True, r"needs recurrence\.max_steps"),
    ("recurrence.lognormal_sigma", 0.5, r"no effect without recurrence\.poisson"),
    (BATCH, Schedule.constant(31), "less than one window of seq_len=32"),
    (BATCH, Schedule.constant(1000), r"1000, not a multiple of .*=32; use 992 or 1024$"),
    (BATCH, Schedule.parse("0:64 constant 9:64.5"), r"the value 64.5, not .* use 64 or 96$"),
    (
        BATCH,
        Schedule.parse("0:256 linear 9:384"),
        r"384, not a multiple of 8 windows .*=32; use 256 or 512, or set batch.mul",
    ),
    ("dataloader.mixture", ["/nowhere/source=1"], "/nowhere/source"),
    ("dataloader.mixture", [], "mixture"),
    ("held_out.interval", -1, r"held_out\.interval=-1 must be at least 0; 0 turns it off"),
    ("checkpoint.async_mode", "sometimes", r"checkpoint\.async_mode=sometimes"),
    ("checkpoint.keep_every", -1, r"checkpoint\.keep_every=-1"),
    ("checkpoint.folder", "elsewhere", r"checkpoint\.folder=elsewhere is not supported"),
    ("checkpoint.last_save_model_only", True, "last_save_model_only=True"),
    ("checkpoint.create_seed_checkpoint", True, "create_seed_checkpoint"),
    ("checkpoint.initial_load_path", "/somewhere", "initial_load_path=/somewhere is not supported"),
    ("stability.threshold", 0.9, r"stability\.threshold=0\.9 must be at least 1 and finite; 8 is"),
]

COMBINATIONS: list[tuple[Mapping[str, Any], int, str]] = [
    ({TP: 8}, 8, r"tensor_parallel_degree=8 must divide model\.n_heads=4"),
    ({TP: 2, "model.n_kv_heads": 1}, 2, "degree=2 must divide model.n_kv_heads=1"),
    (
        {TP: 2, "training.seq_len": 31, BATCH: Schedule.constant(248)},
        2,
        r"_degree=2 must divide training\.seq_len=31",
    ),
    ({CP: 2}, 3, r"context_parallel=2 × tensor_parallel=1 do not factor the world size 3"),
    ({CP: 3}, 3, r"_parallel_degree=3 times 2 must divide training\.seq_len=32"),
    (
        {"training.seq_len": 10**7, BATCH: Schedule.constant(10**7)},
        1,
        r"training\.seq_len . 1 = 10000001",
    ),
    ({BATCH: Schedule.parse("0:512 constant 512:256")}, 8, "does not divide by local_batch_size=4"),
    (
        {"batch.multiple_of_windows": 4, BATCH: Schedule.parse("0:256 constant 9:320")},
        1,
        "320, not a multiple of 4 windows of .*=32; use 256 or 384$",
    ),
    (
        {"model.base_width": 8, "model.tie_weights": True},
        1,
        r"does not fit model\.tie_weights=True",
    ),
    ({**MUON, BACKEND: "spmd_types"}, 1, "name=muon does not support parallelism.spmd_backend"),
    ({**GATE, **MUON}, 1, "name=muon has no matrix to update with trainable=exit_gate; use adamw"),
    ({**GATE, "model.exit_gate": False}, 1, r"needs a gate, and model\.exit_gate=False"),
    (
        {"loss": ExpectedExitLoss.Config(prior="geometric"), "model.exit_gate": False},
        1,
        r"prior=geometric has no effect with model\.exit_gate=False",
    ),
    (
        {"fsdp.policy": "per_step", "parallelism.fsdp_reshard_after_forward": "always"},
        1,
        r"always contradicts fsdp\.policy=per_step",
    ),
    ({"trainable": "exit_gate"}, 1, r"trainable=exit_gate with loss=ExpectedExitLoss\.Config"),
    ({**GATE, "recurrence.steps": Schedule.parse("0:4 constant 100:1")}, 1, "steps: R can be 1, "),
    ({**GATE, "recurrence.poisson": True}, 1, r"R can be 1, .*min_steps=2"),
    (
        {"recurrence.from_data": True, "recurrence.max_steps": 4, "recurrence.poisson": True},
        1,
        r"no recurrence\.poisson",
    ),
    (
        {"recurrence.min_steps": 3, "recurrence.max_steps": 2},
        1,
        "max_steps=2 is below min_steps=3",
    ),
    (
        {"recurrence.backward_steps": 2, "recurrence.backward_growth": ONE},
        1,
        r"recurrence\.backward_growth",
    ),
    ({**HELD_OUT, "held_out.sources": ["/nowhere"]}, 1, "/nowhere"),
    (
        {**HELD_OUT, "dataloader": MANO},
        1,
        "held_out.interval=1 is set, and this data has no held-out text",
    ),
    ({**HELD_OUT, "held_out.depths": []}, 1, r"held_out\.depths=\[\] names none"),
    (
        {"checkpoint.carry.parent": "runs/lm", "checkpoint.enable": False},
        1,
        r"parent=runs/lm has no effect with checkpoint\.enable=False; set checkpoint\.load_only",
    ),
    (
        {"checkpoint.remote": "file:///store", "checkpoint.enable": False},
        1,
        r"remote=file:///store has no effect with checkpoint\.enable=False",
    ),
    (
        {**HELD_OUT, "best": True, "checkpoint.load_only": True},
        1,
        "best=True keeps a checkpoint, and none are saved",
    ),
    (
        {"checkpoint.carry.upcycle": "stacked"},
        1,
        r"upcycle=stacked has no effect without weights to start from; set checkpoint\.carry",
    ),
    ({"best": True}, 1, r"best=True needs held-out text that is scored: set held_out"),
    ({**SPIKES, "stability.skips": 65}, 1, r"skips=65 do not fit into stability\.window=64"),
    ({**SPIKES, "checkpoint.enable": False}, 1, r"rewinds=2 needs checkpoints to go back to"),
    (
        {**SPIKES, "checkpoint.keep_latest_k": 36, "best": True, "held_out.interval": 15},
        1,
        r"=36 of checkpoints 2 or 15 steps apart .* keep at least 38, or all \(0\)",
    ),
    (
        {**SPIKES, "checkpoint.keep_latest_k": 33, "best": True, "held_out.interval": 1},
        1,
        r"=33 of checkpoints 1 steps apart \(with best=True\) may .* keep at least 64, or all",
    ),
    (
        {**SPIKES, "checkpoint.keep_latest_k": 32, "checkpoint.keep_every": 33},  # 66 stays
        1,
        r"=32 of checkpoints 2 steps apart may leave none .*=64; keep at least 33, or all \(0\)",
    ),
]
CASES = [*(({field: value}, 1, message) for field, value, message in VALUES), *COMBINATIONS]


def change(config: Any, changes: Mapping[str, Any]) -> None:
    for field, value in changes.items():
        section, _, name = field.rpartition(".")
        setattr(attrgetter(section)(config) if section else config, name, value)


@pytest.mark.parametrize(("changes", "world_size", "message"), CASES)
def test_a_mistake_is_one_clear_line(source, tmp_path, changes, world_size, message):
    config = tiny_config(source, tmp_path / "run")
    change(config, changes)
    with pytest.raises(UserError, match=message) as caught:
        resolve(config, world_size)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_truncation_reaches_an_embedding_that_every_step_reads(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    config.model, config.recurrence.backward_steps = DenseOptions(injection="additive"), 1
    assert resolve(config, 1).model.reaches_start(2, 1)
    assert not [*remarks(config)]
    config.stability.window = 16
    assert next(remarks(config)).startswith("the settings under stability have no effect")


def test_a_rate_of_0_before_the_end_is_remarked_on(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    assert not list(remarks(config))
    config.total_tokens += 1
    assert ["learning_rate is 0 from 1,536 tokens on" in line for line in remarks(config)] == [True]


def test_a_source_that_holds_nothing_out(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    config.held_out.interval = 1
    config.held_out.sources = [f"{source}/train/.."]  # a source is known by any spelling
    resolve(config, 1)
    empty = shutil.copytree(source, tmp_path / "empty")
    config.held_out.sources = [str(empty)]
    card = json.loads((empty / CARD_NAME).read_text())
    seq_len = config.training.seq_len

    def write_card() -> None:
        card.pop("card_sha256", None)
        signed = {**card, "card_sha256": json_sha256(card)}
        (empty / CARD_NAME).write_text(json.dumps(signed))

    card["splits"]["held_out"]["tokens"] = seq_len
    write_card()
    with pytest.raises(UserError, match=rf"out {seq_len} tokens, less than .* = {seq_len + 1};"):
        resolve(config, 1)
    del card["splits"]["held_out"]
    write_card()
    with pytest.raises(
        UserError,
        match=r"held_out\.interval=1 cannot score any text: .*empty holds out no document",
    ):
        resolve(config, 1)


def test_a_checkpoint_of_another_architecture_is_refused_before_anything_starts(source, tmp_path):
    run = tmp_path / "run"
    config = tiny_config(source, run)
    saved = resolve(config, 1)
    checkpoint = run / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    manifest = {
        "step": 2,
        "trainer": {
            "architecture": saved.architecture,
            "step": 2,
            "tokens": 2 * BATCH_TOKENS,
            "recurrent_steps": 2,
        },
        "data": {},
        "lineage": {},
        "files": {},
    }
    write_manifest(checkpoint, manifest)
    assert check_resumable(saved, newest_of(config))
    config.total_tokens = 2 * BATCH_TOKENS
    assert not check_resumable(resolve(config, 1), newest_of(config))  # nothing left to train

    other = tiny_config(source, run)
    other.model.n_layers = 3
    other.model.exit_gate = False
    with pytest.raises(UserError) as caught:
        check_resumable(resolve(other, 1), newest_of(other))
    message = str(caught.value)
    assert "model.n_layers=3 (checkpoint: 2)" in message
    assert "model.exit_gate=False (checkpoint: True)" in message
    assert "\n" not in message
