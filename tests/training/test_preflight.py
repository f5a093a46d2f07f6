"""Every mistake a user can make in a config: one line that names field, value and fix."""

import json
import os
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.multiprocess import preloaded_context
from tests.support.tiny import BATCH_TOKENS, tiny_config
from titan_loop.checkpoint.manifest import write_manifest
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.source_card import CARD_NAME
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.recipes.on_disk import check_resumable
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.training.chosen_model import newest_of
from titan_loop.training.preflight import setting_refusals
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

Change = Callable[[LoopTrainer.Config], Any]


def _set(path: str, value: Any) -> Change:
    def change(config: LoopTrainer.Config) -> None:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


CASES: dict[str, tuple[Change, int, str]] = {
    "unknown size": (_set("model.size", "quikstart"), 1, r"model\.size=quikstart.*quickstart"),
    "unknown attention": (_set("model.attention", "flx"), 1, r"model\.attention=flx.*flex"),
    "unknown float8": (_set("float8", "mxfp8"), 1, r"float8=mxfp8 is unknown; use off or rowwise"),
    "weights in bf16": (
        _set("training.dtype", "bfloat16"),
        1,
        r"training\.dtype=bfloat16 would round weights .*; leave it at float32",
    ),
    "float8_error": (_set("float8_error", -0.1), 1, r"float8_error=-0\.1 must be 0 "),
    "attention needs CUDA": (_set("model.attention", "flex"), 1, "attention=flex needs CUDA"),
    "heads by TP": (
        _set("parallelism.tensor_parallel_degree", 8),
        8,
        r"tensor_parallel_degree=8 must divide model\.n_heads=4",
    ),
    "kv heads by TP": (
        lambda c: (
            _set("model.n_kv_heads", 1)(c),
            _set("parallelism.tensor_parallel_degree", 2)(c),
        ),
        2,
        r"tensor_parallel_degree=2 must divide model\.n_kv_heads=1",
    ),
    "window by TP": (
        lambda c: (
            _set("training.seq_len", 31)(c),
            _set("batch.global_batch_tokens", Schedule.constant(8 * 31))(c),
            _set("parallelism.tensor_parallel_degree", 2)(c),
        ),
        2,
        r"training\.seq_len=31 must be divisible by .*tensor_parallel_degree=2",
    ),
    "a callback without its base": (
        _set("callbacks", (object(),)),
        1,
        "callbacks: object does not inherit from Callback; add titan_loop",
    ),
    "world does not factor": (
        _set("parallelism.data_parallel_shard_degree", 3),
        4,
        "do not factor the world size 4",
    ),
    "replicas do not factor": (
        _set("parallelism.data_parallel_replicate_degree", 3),
        4,
        "do not factor the world size 4",
    ),
    "context parallel": (
        _set("parallelism.context_parallel_degree", 2),
        3,
        r"context_parallel=2 × tensor_parallel=1 do not factor the world size 3",
    ),
    "window for context parallelism": (
        _set("parallelism.context_parallel_degree", 3),
        3,
        r"seq_len=32 must be divisible by 2 × parallelism\.context_parallel_degree=3",
    ),
    "steps trained through": (
        _set("recurrence.backward_steps", 0),
        1,
        r"recurrence\.backward_steps=0 is below 1",
    ),
    "an embedding that nothing trains": (
        _set("recurrence.backward_steps", 1),
        1,
        r"recurrence\.backward_steps=1 never reaches the embedding, .* and R is 2 or more; set",
    ),
    "pipeline parallel": (
        _set("parallelism.pipeline_parallel_degree", 2),
        2,
        "pipeline_parallel_degree=2 is not supported",
    ),
    "full_dtensor": (_set("parallelism.spmd_backend", "full_dtensor"), 1, "full_dtensor is not"),
    "R of the model below 1": (
        _set("model.recurrent_steps", 0),
        1,
        r"model\.recurrent_steps=0 must be at least 1",
    ),
    "vocabulary too small": (
        _set("model.vocab_size", 200),
        1,
        r"model\.vocab_size=200 is too small: the data's largest token is 29\d",
    ),
    "missing source": (
        _set("dataloader.mixture", ["/nowhere/source=1"]),
        1,
        "/nowhere/source",
    ),
    "no data": (_set("dataloader.mixture", []), 1, "mixture"),
    "window longer than the source": (
        lambda c: (
            _set("training.seq_len", 10**7)(c),
            _set("batch.global_batch_tokens", Schedule.constant(10**7))(c),
        ),
        1,
        "training.seq_len . 1 = 10000001",
    ),
    "batch does not divide": (
        _set("training.local_batch_size", 3),
        1,
        r"8 windows does not divide by local_batch_size=3",
    ),
    "a later point of the ramp does not divide": (
        _set(
            "batch.global_batch_tokens",
            Schedule.steps([(0, BATCH_TOKENS * 2), (BATCH_TOKENS * 2, BATCH_TOKENS)]),
        ),
        8,
        "8 windows does not divide by local_batch_size=2 × 8",
    ),
    "no tokens": (_set("total_tokens", 0), 1, "total_tokens=0 must be at least 1"),
    "memory snapshot on CPU": (
        _set("profiler.enable_memory_snapshot", True),
        1,
        "enable_memory_snapshot=True records CUDA allocations",
    ),
    "no logging": (_set("metrics.log_freq", 0), 1, r"metrics\.log_freq=0 must be at least 1"),
    "no garbage collection": (_set("training.gc_freq", 0), 1, r"training\.gc_freq=0 must be"),
    "beta": (_set("adamw.beta2", 1.5), 1, r"adamw\.beta2=1\.5 must be at least 0 and below 1"),
    "weight decay": (
        _set("adamw.weight_decay", -0.1),
        1,
        r"adamw\.weight_decay=-0\.1 must be finite",
    ),
    "eps": (_set("adamw.eps", 0.0), 1, r"adamw\.eps=0\.0 must be above 0"),
    "optimiser": (_set("optimizer.name", "lion"), 1, r"optimizer\.name=lion is unknown.*or muon"),
    "momentum": (
        _set("muon.momentum", 1.0),
        1,
        r"muon\.momentum=1\.0 must be at least 0 and below",
    ),
    "decay of Muon": (
        _set("muon.weight_decay", -1),
        1,
        r"muon\.weight_decay=-1 must be finite and at least 0",
    ),
    "iterations": (_set("muon.iterations", 0), 1, r"muon\.iterations=0 must be from 1 to 99"),
    "rate factor": (_set("muon.rate_factor", 0.0), 1, r"muon\.rate_factor=0\.0 must be above 0"),
    "scale": (_set("muon.scale", "rms"), 1, r"muon\.scale=rms is unknown; use original or match"),
    "Muon's dtype": (_set("muon.dtype", "fp16"), 1, r"muon\.dtype=fp16 is unknown; use auto or"),
    "weights on the host": (
        _set("training.enable_cpu_offload", True),
        1,
        r"training\.enable_cpu_offload=True moves weights off a GPU, and there is none; leave it",
    ),
    "Muon's backend": (
        lambda c: (
            _set("optimizer.name", "muon")(c),
            _set("parallelism.spmd_backend", "spmd_types")(c),
        ),
        1,
        r"optimizer\.name=muon does not support parallelism\.spmd_backend=spmd_types",
    ),
    "Muon without matrices": (
        lambda c: (
            _set("optimizer.name", "muon")(c),
            _set("trainable", "exit_gate")(c),
            _set("loss", AdaptiveGateLoss.Config())(c),
        ),
        1,
        r"optimizer\.name=muon has no matrix to update with trainable=exit_gate; use adamw",
    ),
    "average of itself": (_set("ema.decay", 1.0), 1, r"ema\.decay=1\.0 must be .* below 1; 0\.999"),
    "decay of the average": (_set("ema.decay", -0.1), 1, r"ema\.decay=-0\.1 must be at least 0"),
    "interval of the average": (_set("ema.interval", 0), 1, r"ema\.interval=0 must be at least 1"),
    "start of the average": (_set("ema.start_tokens", -1), 1, r"ema\.start_tokens=-1 is negative"),
    "gradient norm": (
        _set("training.max_norm", -1.0),
        1,
        r"training\.max_norm=-1\.0 must be above",
    ),
    "peak of a device": (
        _set("metrics.device_peak_flops", 0.0),
        1,
        r"metrics\.device_peak_flops=0\.0 must be above 0",
    ),
    "seed": (_set("debug.seed", -1), 1, r"debug\.seed=-1 must be from 0"),
    "not a real job": (_set("comm.mode", "fake_backend"), 1, r"comm\.mode=fake_backend"),
    "negative rate": (
        _set("learning_rate", Schedule.constant(-1.0)),
        1,
        r"learning_rate='.*-1.*' falls below 0",
    ),
    "negative entropy weight": (
        _set("entropy_weight", Schedule.steps([(0, 0.1), (64, -0.1)])),
        1,
        r"entropy_weight='.*' falls below 0",
    ),
    "prior": (
        _set("loss", ExpectedExitLoss.Config(prior="geometric", geometric_eta=1.5)),
        1,
        r"geometric_eta=1\.5",
    ),
    "readout chunk": (
        _set("model.readout_chunk_tokens", 0),
        1,
        r"model\.readout_chunk_tokens=0 must be at least 1",
    ),
    "negative step limit": (_set("training.steps", -1), 1, r"training\.steps=-1 is negative"),
    "R of the schedule below 1": (
        _set("recurrence.steps", Schedule.constant(0)),
        1,
        r"recurrence\.steps='0",
    ),
    "more steps than memory": (
        _set("recurrence.steps", Schedule.constant(100_000_000)),
        1,
        r"recurrence\.steps='100M': a training step of R = 100000000.* at least .* GiB",
    ),
    "model-only last checkpoint": (
        _set("checkpoint.last_save_model_only", True),
        1,
        "last_save_model_only=True",
    ),
    "seed checkpoint": (
        _set("checkpoint.create_seed_checkpoint", True),
        1,
        "create_seed_checkpoint",
    ),
    "initial weights": (
        _set("checkpoint.initial_load_path", "/somewhere"),
        1,
        "initial_load_path=/somewhere is not supported",
    ),
    "spmd_types on an old torch": (
        _set("parallelism.spmd_backend", "spmd_types"),
        1,
        r"spmd_types needs torch 2\.15",
    ),
    "a missing held-out source": (
        lambda c: (_set("held_out.interval", 1)(c), _set("held_out.sources", ["/nowhere"])(c)),
        1,
        "/nowhere",
    ),
    "held-out text of generated data": (
        lambda c: (
            _set("held_out.interval", 1)(c),
            _set("dataloader", TaskLoader.Config(task=Mano(max_operations=3)))(c),
        ),
        1,
        r"held_out\.interval=1: this data has no held-out text",
    ),
    "upstream's batch size": (
        _set("training.global_batch_size", 64),
        1,
        r"training\.global_batch_size=64 is not used; set --batch\.global-batch-tokens",
    ),
    "held-out depth": (
        lambda c: (_set("held_out.interval", 1)(c), _set("held_out.depths", [0])(c)),
        1,
        r"held_out\.depths=\[0\]",
    ),
    "width and heads": (_set("model.n_heads", 3), 1, r"model\.n_heads=3 must divide model\.dim=64"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_clear_line(source, tmp_path, case):
    change, world_size, message = CASES[case]
    config = tiny_config(source, tmp_path / "run")
    change(config)
    with pytest.raises(UserError, match=message) as caught:
        resolve(config, world_size)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_muon_s_weights_on_the_host_are_refused_with_a_gpu_too(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    config.optimizer.name, config.training.enable_cpu_offload = "muon", True
    (refusal,) = setting_refusals(config, starts_trained=False)
    assert "optimizer.name=muon with training.enable_cpu_offload=True" in str(refusal)


def test_a_batch_that_does_not_divide_names_the_batch(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    config.training.local_batch_size = 3
    fixes = r"use --training\.local-batch-size {}, or --batch\.global-batch-tokens {}$"
    fix = r"does not divide by local_batch_size=3 × 1 .*; " + fixes.format(2, 288)
    with pytest.raises(UserError, match=fix):
        resolve(config, 1)
    config.training.local_batch_size = 2
    fix = r"by local_batch_size=2 × 8 .*; " + fixes.format(1, 512)
    with pytest.raises(UserError, match=fix):
        resolve(config, 8)
    config.batch.global_batch_tokens = Schedule.constant(512)
    resolve(config, 8)


def test_a_source_that_holds_nothing_out(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    config.held_out.interval = 1
    config.held_out.sources = [f"{source}/train/.."]  # a source is known by any spelling
    resolve(config, 1)
    empty = shutil.copytree(source, tmp_path / "empty")
    config.held_out.sources = [str(empty)]
    card = json.loads((empty / CARD_NAME).read_text())
    del card["card_sha256"]
    seq_len = config.training.seq_len
    card["splits"]["held_out"]["tokens"] = seq_len
    (empty / CARD_NAME).write_text(json.dumps(card))
    with pytest.raises(UserError, match=rf"out {seq_len} tokens, less than .* = {seq_len + 1};"):
        resolve(config, 1)
    del card["splits"]["held_out"]
    (empty / CARD_NAME).write_text(json.dumps(card))
    with pytest.raises(UserError, match=r"held_out\.interval=1: .*empty holds out no document"):
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

    other = tiny_config(source, run)
    other.checkpoint.load_step = 7
    with pytest.raises(UserError, match=r"checkpoint\.load_step=7 does not exist"):
        check_resumable(resolve(other, 1), newest_of(other))
    newer = run / "checkpoints" / "step-4"
    newer.mkdir()
    (newer / "manifest.json").write_text("{ torn")
    other.checkpoint.load_step = 2
    with pytest.raises(UserError, match=r"would leave newer checkpoints \[4\]"):
        check_resumable(resolve(other, 1), newest_of(other))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("last_save_model_only", True),
        ("async_mode", "sometimes"),
        ("keep_every", -1),
        ("save_attempts", 0),
        ("retry_seconds", -1.0),
    ],
)
def test_unusable_checkpoint_settings_are_refused(field, value):
    from titan_loop.checkpoint.manager import LoopCheckpointManager

    with pytest.raises(UserError, match=rf"checkpoint\.{field}={value}"):
        LoopCheckpointManager.Config(**{field: value})


def test_a_run_directory_below_a_file_is_refused(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run_recipe(Recipe.of_one_run("run", tiny_config(source, tmp_path / "file" / "run")))


def _train_as(user: int, source: Path, run: Path, answer: Connection) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    try:
        run_recipe(Recipe.of_one_run("run", tiny_config(source, run)))
    except UserError as error:
        answer.send(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_run_directory_without_permission_is_refused(source, tmp_path):
    """Root may write anywhere, so an unprivileged user tries."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    for folder in (source, *source.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    context = preloaded_context()
    said, answer = context.Pipe(duplex=False)
    child = context.Process(target=_train_as, args=(65534, source, locked / "run", answer))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert said.poll()
    assert "cannot be written (Permission denied)" in said.recv()
