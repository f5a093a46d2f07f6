"""The report of a training step: `metrics.jsonl`, TensorBoard, W&B and one console line.

Keys of a record, in this order: `step`, `tokens` (global, consumed), `loss`, the objective's
metrics (`ce/step_1…R`, `exit/pmf_1…R`, `exit/entropy_nats`, `exit/mean_step`; a gate stage also
`improvement/step_2…R`, `gate/target_2…R`, `gate/bce_2…R`), `grad_norm` (before clipping), `lr` (as
scheduled, and `lr/muon_x0.5` and the like for parameters that have a factor on it),
`recurrent_steps`, `entropy_weight`, `global_batch_tokens`, `data_hash`, `windows_consumed`,
`io_retries` (reads that the rank with the most had to repeat since it started), and of every source
`data/NAME/tokens` and `data/NAME/epochs`, read by all ranks since the start; with
`stability.straggler` also `ranks/…` (seconds of a step and of waits for data, products' time over
the median) and `straggler`. Then, since the last record: `tokens_per_second` (global),
`flops_per_token` (model FLOPs, each step's at its own R), `mfu` (the same as a fraction of the
devices' peak in the precision they compute in; null if that is not known), `peak_memory_bytes`
(rank 0: reserved on CUDA, resident on CPU) and `data_wait` (rank 0: share of the time in which
training waited for data). Numbers that are not finite are null. A metric of an objective comes
through its loss class, a callback's through `Callback.record`; neither needs a change here.
"""

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
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    WandBLogger,
)
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from titan_loop.distributed.devices import DEVICES
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import finite_or_null, write_text
from titan_loop.storage.kept_records import append_or_keep
from titan_loop.storage.regular_file import read_regular

_A100_PEAK_FLOPS = 312e12
"""Upstream's answer for an A100, and for every device that it does not know."""

WANDB_STEP = "train/step"
"""W&B's axis of training steps."""


class LoopMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics processor with loop metrics, global token rates and a tested JSONL file.

    Call `start` once before the first step, `count_flops` after every step, `log_step` after those
    for which `should_log` is true, and wrap evaluation and the like in `paused`, so that it does
    not count as training time.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Where metrics go besides `metrics.jsonl`, and how often."""

        device_peak_flops: float | None = None
        """Peak FLOP/s of one device in the precision that layers compute in; None takes the known
        one of bf16 or fp32."""

        progress: bool = True
        """Print one line per logged step."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **upstream: Any) -> None:
        if config.save_for_all_ranks:
            raise UserError(
                "metrics.save_for_all_ranks=True is not supported: every metric is global; set it "
                "to False"
            )
        self.run_directory = RunDirectory(dump_folder)
        super().__init__(config, dump_folder=dump_folder, **upstream)
        if not sys.stdout.isatty():  # escape codes make a log file hard to read and to search
            self.color = titan_utils.NoColor()
        self.device_peak_flops = config.device_peak_flops
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
        """Write into the run directory itself instead of upstream's dated sub-folder of `tb`."""
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

        The last of `total_steps` is always logged. `compute_dtype`, bfloat16 or float32, is the
        precision of the layers' products.
        """
        if self.device_peak_flops is None:
            device = self.device_memory_monitor.device_name
            self.device_peak_flops = known_peak_flops(device, compute_dtype)
        self._total_steps = total_steps
        self.restart_clock(step, tokens)
        if self._writes:
            extras = [
                f"{self.config.save_tb_folder}/" if self.config.enable_tensorboard else "",
                "wandb/" if self.config.enable_wandb else "",
            ]
            names = ", ".join(["metrics.jsonl", "checkpoints/", *filter(None, extras)])
            logger.info("Writing %s to %s", names, self.run_directory.path.resolve())

    def should_log(self, step: int) -> bool:
        """Return whether to log `step`: the first, the last, and every `log_freq`-th."""
        return super().should_log(step) or step == self._total_steps

    def count_flops(self, flops: float) -> None:
        """Add the model FLOPs of a step, of all ranks together, to the measuring interval."""
        self._flops += flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside as training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - began

    def log_step(self, record: Mapping[str, Any], summary: Sequence[str] = ()) -> dict[str, Any]:
        """Write one step everywhere and start the next measuring interval.

        Args:
            record: The step's numbers without rates; every value is equal on all ranks.
            summary: The objective's part of the console line.

        Returns:
            The record as written to `metrics.jsonl` (rates and memory are this rank's own).
        """
        step, tokens = record["step"], record["tokens"] - self._last_tokens
        elapsed = time.perf_counter() - self.time_last_log - self._paused_seconds
        elapsed = max(elapsed, 1e-9)
        metrics: dict[str, Any] = finite_or_null(
            {
                **record,
                "tokens_per_second": tokens / elapsed,
                "flops_per_token": self._flops / max(tokens, 1),
                "mfu": self._mfu(elapsed),
                "peak_memory_bytes": self._peak_memory_bytes(),
                "data_wait": sum(self.data_loading_times) / elapsed,
            }
        )
        if self._writes:
            append_or_keep(self.run_directory.metrics_jsonl, metrics)
            self.log_numbers(metrics, step)
            if self.config.progress:
                total = self._total_steps or step
                left = (total - step) * elapsed / max(step - self._last_step, 1)
                logger.info(progress_line(metrics, summary, total, left, self.color))
        self.restart_clock(step, record["tokens"])
        return metrics

    def restart_clock(self, step: int, tokens: int) -> None:
        """Measure from now on, from this step and these global tokens."""
        self._last_step, self._last_tokens = step, tokens
        self._paused_seconds = self._flops = 0.0
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def log_numbers(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the numbers among `metrics` to TensorBoard and W&B, where enabled; on any rank."""
        numbers = {
            key: value
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        try:
            self.logger.log(numbers, step)
        except Exception as error:  # a tracking service must never stop a training run
            logger.warning("TensorBoard and W&B are off from step %d on (%s)", step, error)
            self.logger = BaseLogger()

    def _mfu(self, seconds: float) -> float | None:
        # Quantised products run at another peak than bf16's, so the fraction would mislead.
        if self.device_peak_flops is None or self.has_quantization:
            return None
        world_peak = self.device_peak_flops * self.parallel_dims.world_size
        return self._flops / seconds / world_peak

    def _peak_memory_bytes(self) -> int:
        stats = titan_utils.device_module.memory_stats(self.device_memory_monitor.device)
        return stats["reserved_bytes.all.peak"]


class _WandB(WandBLogger):
    """Upstream's, with a step axis of our own.

    W&B drops records of steps below the last one, as after a fallback to an older checkpoint.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.wandb.define_metric(WANDB_STEP)
        self.wandb.define_metric("*", step_metric=WANDB_STEP)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Log `metrics` at `step` of the axis."""
        self.wandb.log({**metrics, WANDB_STEP: step})


@contextmanager
def _one_wandb_run(run_directory: RunDirectory) -> Iterator[None]:
    """Let W&B continue its run of earlier starts, whose id is drawn once (`wandb/run_id`).

    WANDB_RUN_ID, if set, decides.
    """
    if "WANDB_RUN_ID" in os.environ:
        yield
        return
    path = run_directory.wandb_run_id
    if not path.exists():
        write_text(path, secrets.token_hex(8) + "\n")
    resume = os.environ.get("WANDB_RESUME")
    os.environ["WANDB_RUN_ID"] = read_regular(path, fix="delete it").decode().strip()
    os.environ["WANDB_RESUME"] = resume or "allow"
    try:
        yield
    finally:  # the next stage in this process is another run
        del os.environ["WANDB_RUN_ID"]
        if resume is None:
            del os.environ["WANDB_RESUME"]


def global_means(
    loss: Tensor, metrics: Mapping[str, Tensor], mesh: DeviceMesh | None
) -> tuple[float, dict[str, float]]:
    """Return a step's loss and the objective's metrics as means over the global batch; collective.

    Loss and metrics are this rank's shares, scalars; the shares of the ranks of `mesh` add up.
    """
    totals = torch.stack([loss.float(), *(value.float() for value in metrics.values())])
    if mesh is not None:
        totals = dist_utils.dist_sum_tensor(totals, mesh)
    mean_loss, *means = totals.tolist()
    return mean_loss, dict(zip(metrics, means, strict=True))


def known_peak_flops(device_name: str, compute_dtype: str = "bfloat16") -> float | None:
    """Return a device's peak in FLOP/s, None if it is not known.

    The bf16 peak is from torchtitan's table, but for the A100's figure that it gives unknown
    devices. The fp32 peak is from the plan's GPU of the same name and bf16 peak.
    """
    peak = titan_utils.get_peak_flops(device_name)
    is_fallback = peak == _A100_PEAK_FLOPS and "A100" not in device_name
    if is_fallback or not math.isfinite(peak):
        return None
    if compute_dtype == "bfloat16":
        return peak
    same = (
        device.fp32_peak_flops
        for name, device in DEVICES.items()
        if name.split("-")[0].upper() in device_name and device.peak_flops == peak
    )
    return next(same, None)


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
        f"{_with_suffix(metrics['tokens'])} tokens",
        f"{color.green}loss {_number(metrics['loss'], '.4f')}{color.reset}",
    ]
    mfu = metrics["mfu"]
    parts += [
        *summary,
        f"R {metrics['recurrent_steps']}",
        f"grad {_number(metrics['grad_norm'], '.2f')}",
        f"lr {metrics['lr']:.2e}",
        f"{color.blue}{_with_suffix(metrics['tokens_per_second'])} tok/s{color.reset}",
        f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB",
        "MFU -" if mfu is None else f"MFU {mfu:.1%}",
        f"ETA {format_duration(remaining_seconds)}",
    ]
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units: 45s, 12m30s, 3h05m, 2d04h."""
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"


def _number(value: float | None, spec: str) -> str:
    return "not finite" if value is None else format(value, spec)


def _with_suffix(value: float) -> str:
    for suffix in ("", "K", "M", "B"):
        if value < 999.5:
            return (
                f"{value:.0f}{suffix}" if value >= 99.95 or not suffix else f"{value:.3g}{suffix}"
            )
        value /= 1000
    return f"{value:.3g}T"
