"""Metrics: the keys of metrics.jsonl, rates from global tokens, and the console line."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401 (must come before torchtitan)
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils as titan_utils

from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training import metrics_processor
from titan_loop.training.metrics_processor import LoopMetricsProcessor

RATES = ["tokens_per_second", "flops_per_token", "mfu", "peak_memory_bytes", "data_wait"]

RECORD = {
    "step": 1,
    "tokens": 4096,
    "loss": 5.1234,
    "ce/step_1": 5.4,
    "ce/step_2": 5.2,
    "grad_norm": 0.83,
    "lr": 3e-4,
    "recurrent_steps": 2,
    "data_hash": "c0ffee",
}


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(metrics_processor.time, "perf_counter", lambda: self.now)


def build(folder: Path, **fields: Any) -> LoopMetricsProcessor:
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=1,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=1,
        spmd_backend="partial_dtensor",
    )
    config = LoopMetricsProcessor.Config(**fields)
    return config.build(parallel_dims=dims, dump_folder=str(folder), config_dict={"a": 1})


def test_rates_count_global_tokens_and_not_paused_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clock = Clock(monkeypatch)
    processor = build(tmp_path)
    monkeypatch.setattr(metrics_processor, "known_peak_flops", lambda *_: 1e10)
    processor.start(step=5, tokens=10_000, total_steps=200)
    clock.now += 4
    for flops in (1e9, 2e9, 0.5e9, 0.5e9):  # R falls
        processor.count_flops(flops)
    with processor.paused():
        clock.now += 50
    with caplog.at_level(logging.INFO):
        given = RECORD | {"step": 9, "tokens": 14_000, "grad_norm": float("nan")}
        written = processor.log_step(given, ["CE 5.400→5.200"])
    assert [written] == RunDirectory(tmp_path).read_metrics()
    assert list(written) == [*RECORD, *RATES]
    assert written["tokens_per_second"] == pytest.approx(1000)
    assert written["mfu"] == pytest.approx(4e9 / 4 / 1e10)
    line = caplog.records[-1].message
    assert line.startswith(
        "step   9/200   4% | 14K tokens | loss 5.1234 | CE 5.400→5.200 | R 2 | "
        "grad not finite | lr 3.00e-04 | "
    )
    assert line.endswith("ETA 3m11s")  # 191 steps at one second each
    clock.now += 2
    processor.count_flops(1e9)
    written = processor.log_step(RECORD | {"step": 10, "tokens": 15_000})
    assert (written["tokens_per_second"], written["mfu"]) == (500, 1e9 / 2 / 1e10)


def test_wandb_keeps_what_is_logged_after_a_fallback(tmp_path: Path, monkeypatch):
    """W&B itself drops whatever comes at a step below the last one."""
    kept: list[dict[str, Any]] = []
    last = -1

    def log(record: dict[str, Any], step: int | None = None) -> None:
        nonlocal last
        last = last + 1 if step is None else max(last, step)
        if step is None or step == last:
            kept.append(record)

    axes: list[tuple[str, str | None]] = []
    wandb = SimpleNamespace(
        init=lambda **_: None, log=log, run=None,
        define_metric=lambda name, step_metric=None: axes.append((name, step_metric)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    processor = build(tmp_path, enable_wandb=True)
    for step in (1, 2, 3, 2, 3):
        processor.log_numbers({"loss": 1.0}, step)
    assert [record["train/step"] for record in kept] == [1, 2, 3, 2, 3]
    assert ("*", "train/step") in axes


def test_every_start_of_a_run_continues_one_wandb_run(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    # It imports W&B's launcher, which takes longer than all the rest.
    launcher = "wandb.sdk.wandb_run.Run._detect_and_apply_job_inputs"
    monkeypatch.setattr(launcher, lambda _: None, raising=False)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for run in ("first", "first", "second"):
        build(tmp_path / run, enable_wandb=True).close()
    first, second = (RunDirectory(tmp_path / run) for run in ("first", "second"))
    ids = [run.wandb_run_id.read_text().strip() for run in (first, second)]
    assert ids[0] != ids[1]
    for run, run_id in zip((first, second), ids, strict=True):
        assert list((run.path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert "WANDB_RUN_ID" not in os.environ
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    build(tmp_path / "third", enable_wandb=True).close()
    assert list((tmp_path / "third" / "wandb").glob("offline-run-*-mine"))


def test_a_failing_tracker_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Failing(BaseLogger):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            raise OSError("disk full")

    processor = build(tmp_path)
    processor.logger = Failing()
    processor.log_step(RECORD)
    processor.log_step(RECORD | {"step": 2})
    assert caplog.text.count("disk full") == 1
    assert len(RunDirectory(tmp_path).read_metrics()) == 2


def test_peak_flops_only_for_known_devices(monkeypatch: pytest.MonkeyPatch):
    def upstream_table(device_name: str) -> float:
        return 989e12 if "H100" in device_name else 312e12

    monkeypatch.setattr(titan_utils, "get_peak_flops", upstream_table)
    assert metrics_processor.known_peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert metrics_processor.known_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert metrics_processor.known_peak_flops("NVIDIA GeForce RTX 4090") is None
    for name, fp32 in {
        "NVIDIA H100 80GB HBM3": 67e12,
        "NVIDIA A100-SXM4-80GB": 19.5e12,
        "NVIDIA GeForce RTX 4090": None,
    }.items():
        assert metrics_processor.known_peak_flops(name, "float32") == fp32
    monkeypatch.setattr(titan_utils, "get_peak_flops", lambda device_name: float("nan"))
    assert metrics_processor.known_peak_flops("CPU") is None
