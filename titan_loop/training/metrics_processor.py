"""Destinations of a step's record: `metrics.jsonl`, TensorBoard, W&B and one console line."""

import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import titan_loop.compat  # noqa: F401 (must come before torchtitan)
import torch.distributed as dist
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    WandBLogger,
)
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from titan_loop.distributed.devices import DEVICES
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import finite_or_null, read_small, write_text
from titan_loop.storage.kept_records import append_or_keep
from titan_loop.tables import format_duration, short

_A100_PEAK_FLOPS = 312e12
"""Upstream's answer for an A100, and for every device that it does not know."""

WANDB_STEP = "train/step"
"""W&B's axis of training steps."""


class LoopMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics processor with loop metrics, global token rates and a JSONL file.

    Call `start` once before the first step, `count_flops` after every step and `log_step` after
    each step for which `should_log` is true. Time in `paused` does not count as training time.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Destinations of metrics besides `metrics.jsonl`, and their interval."""

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **upstream: Any) -> None:
        self.run_directory = RunDirectory(dump_folder)
        super().__init__(config, dump_folder=dump_folder, **upstream)
        if not sys.stdout.isatty():  # escape codes make a log file hard to read and to search
            self.color = titan_utils.NoColor()
        self.device_peak_flops: float | None = None
        self._writes = not dist.is_initialized() or dist.get_rank() == 0
        self._total_steps: int | None = None
        self._last_step = self._last_tokens = 0
        self._paused_seconds = self._flops = 0.0

    def _build_metric_logger(
        self,
        *,
        config: MetricsProcessor.Config,
        dump_folder: str,
        config_dict: dict[str, Any] | None = None,
        tag: str | None = None,
        **_: Any,
    ) -> BaseLogger:
        # Into the run directory itself instead of upstream's dated sub-folder.
        loggers = LoggerContainer()
        if dist.is_initialized() and dist.get_rank() != 0:
            return loggers
        if config.enable_wandb:
            os.environ.setdefault("WANDB_PROJECT", "titan_loop")
            try:
                with _one_wandb_run(self.run_directory):
                    loggers.add_logger(_WandB(dump_folder, config_dict=config_dict, tag=tag))
            except Exception as error:  # a tracking service must never stop a training run
                logger.error("metrics.enable_wandb: W&B is off for this run (%s)", error)
        if config.enable_tensorboard:
            folder = os.path.join(dump_folder, config.save_tb_folder)
            loggers.add_logger(TensorBoardLogger(folder, tag))
        return loggers

    def start(
        self, *, step: int, tokens: int, total_steps: int, compute_dtype: str = "bfloat16"
    ) -> None:
        """Start the clock at a step, 0 or a checkpoint's, and log the paths of all files.

        `compute_dtype` is the precision of the layers' matrix products, bfloat16 or float32.
        """
        device = self.device_memory_monitor.device_name
        self.device_peak_flops = known_peak_flops(device, compute_dtype)
        self._total_steps = total_steps
        self._restart_clock(step, tokens)
        if self._writes:
            names = ["metrics.jsonl", "checkpoints/"]
            if self.config.enable_tensorboard:
                names.append(f"{self.config.save_tb_folder}/")
            if self.config.enable_wandb:
                names.append("wandb/")
            logger.info("Writing %s to %s", ", ".join(names), self.run_directory.path.resolve())

    def should_log(self, step: int) -> bool:
        """Return whether to log `step`: the first, the last, and every `log_freq`-th."""
        return super().should_log(step) or step == self._total_steps

    def count_flops(self, flops: float) -> None:
        """Add a step's model FLOPs, all ranks together, to the current measuring interval."""
        self._flops += flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - began

    def log_step(self, record: Mapping[str, Any], summary: Sequence[str] = ()) -> dict[str, Any]:
        """Write one step everywhere, start the next measuring interval, and return the record.

        `record` comes from `step_record`; `summary` is the objective's part of the console line.
        """
        step, tokens = record["step"], record["tokens"] - self._last_tokens
        elapsed = max(time.perf_counter() - self.time_last_log - self._paused_seconds, 1e-9)
        world_peak = None
        # Quantised products run at another peak than bf16's, so the fraction would mislead.
        if self.device_peak_flops is not None and not self.has_quantization:
            world_peak = self.device_peak_flops * self.parallel_dims.world_size
        memory = titan_utils.device_module.memory_stats(self.device_memory_monitor.device)
        metrics: dict[str, Any] = finite_or_null(
            {
                **record,
                "tokens_per_second": tokens / elapsed,
                "flops_per_token": self._flops / max(tokens, 1),
                "mfu": None if world_peak is None else self._flops / elapsed / world_peak,
                "peak_memory_bytes": memory["reserved_bytes.all.peak"],
                "data_wait": sum(self.data_loading_times) / elapsed,
            }
        )
        if self._writes:
            append_or_keep(self.run_directory.metrics_jsonl, metrics)
            self.log_numbers(metrics, step)
            total = self._total_steps or step
            left = (total - step) * elapsed / max(step - self._last_step, 1)
            logger.info(progress_line(metrics, summary, total, left, self.color))
        self._restart_clock(step, record["tokens"])
        return metrics

    def _restart_clock(self, step: int, tokens: int) -> None:
        self._last_step, self._last_tokens = step, tokens
        self._paused_seconds = self._flops = 0.0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def log_numbers(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the numbers among `metrics` to TensorBoard and W&B, where enabled; on any rank."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        numbers.pop("step", None)
        try:
            self.logger.log(numbers, step)
        except Exception as error:  # a tracking service must never stop a training run
            logger.warning("TensorBoard and W&B are off from step %d on (%s)", step, error)
            self.logger = BaseLogger()


class _WandB(WandBLogger):
    """Upstream's, with its own axis of steps: W&B drops records when its steps go back."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.wandb.define_metric(WANDB_STEP)
        self.wandb.define_metric("*", step_metric=WANDB_STEP)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Log `metrics` at `step` of our axis."""
        self.wandb.log({**metrics, WANDB_STEP: step})


@contextmanager
def _one_wandb_run(run_directory: RunDirectory) -> Iterator[None]:
    """Let W&B continue the run WANDB_RUN_ID, else the run of earlier starts (`wandb/run_id`)."""
    if "WANDB_RUN_ID" in os.environ:
        yield
        return
    path = run_directory.wandb_run_id
    if not path.exists():
        write_text(path, secrets.token_hex(8) + "\n")
    resume = os.environ.get("WANDB_RESUME")
    os.environ["WANDB_RUN_ID"] = read_small(path, fix="delete it").decode().strip()
    os.environ["WANDB_RESUME"] = resume or "allow"
    try:
        yield
    finally:  # the next stage in this process is another run
        del os.environ["WANDB_RUN_ID"]
        if resume is None:
            del os.environ["WANDB_RESUME"]


def known_peak_flops(device_name: str, compute_dtype: str = "bfloat16") -> float | None:
    """Return a device's peak in FLOP/s, None if it is not known."""
    peak = titan_utils.get_peak_flops(device_name)
    is_fallback = peak == _A100_PEAK_FLOPS and "A100" not in device_name
    if is_fallback or not math.isfinite(peak):
        return None
    if compute_dtype == "bfloat16":
        return peak
    for name, device in DEVICES.items():
        if name.split("-")[0].upper() in device_name and device.peak_flops == peak:
            return device.fp32_peak_flops
    return None


def progress_line(
    metrics: Mapping[str, Any],
    summary: Sequence[str],
    total_steps: int,
    remaining_seconds: float,
    color: titan_utils.Color | titan_utils.NoColor,
) -> str:
    """Return the console line of one step, from its record and the objective's summary."""
    step = metrics["step"]
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps} {step / total_steps:4.0%}",
        f"{short(metrics['tokens'])} tokens",
        f"{color.green}loss {_number(metrics['loss'], '.4f')}{color.reset}",
        *summary,
        f"R {metrics['recurrent_steps']}",
        f"grad {_number(metrics['grad_norm'], '.2f')}",
        f"lr {metrics['lr']:.2e}",
        f"{color.blue}{short(metrics['tokens_per_second'])} tok/s{color.reset}",
        f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB",
        "MFU -" if metrics["mfu"] is None else f"MFU {metrics['mfu']:.1%}",
        f"ETA {format_duration(remaining_seconds)}",
    ]
    return " | ".join(parts)


def _number(value: float | None, spec: str) -> str:
    return "not finite" if value is None else format(value, spec)
