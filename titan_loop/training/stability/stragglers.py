"""Times of every rank, gathered on logging steps, and the rank that slows down the others.

Ranks wait for each other in every layer, so all steps take the same time, whichever rank is slow.
Only two times are a rank's own: its waits for data, and fixed matrix products that are timed here.
"""

import logging
import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_loop.ranks import warn_together
from titan_loop.training.callback import Callback, Phase, TrainingState

logger = logging.getLogger(__name__)

_SIZE = {"cpu": 192, "cuda": 4096}
_ROUNDS = 4
_LEAST_WAIT = 0.02
"""Share of a step below which a wait for data slows nobody down."""


class RankTimes(NamedTuple):
    """Seconds on one rank: a mean step, its wait for data, and the matrix products just timed."""

    step: float
    data: float
    products: float


class Stragglers(Callback):
    """Names the rank whose own time is at least `factor` times the median over all ranks."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self._factor, self._device = factor, device
        size = _SIZE.get(device.type, 1024)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        # Powers of this matrix equal it: no product overflows.
        self._matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
        self._began, self._steps = time.perf_counter(), 0
        self._hosts: list[str] = []
        self._named: list[str] = []

    def on_phase(self, trainer: TrainingState, phase: Phase) -> None:
        """Count training steps: data that may end is read in two phases of a step."""
        self._steps += phase == "update"

    def record(self, trainer: TrainingState) -> Mapping[str, Any]:
        """Return `ranks/…`; warn when a rank becomes a straggler, not at every record."""
        record = self.gather(sum(trainer.metrics_processor.data_loading_times))
        found = record.get("straggler", "")
        named = found.split(" ")[:2]  # "rank N": the ratio differs in every record
        if found and named != self._named:
            warn_together(logger, "straggler: %s", found)
        self._named = named
        return record

    def gather(self, data_seconds: float) -> dict[str, Any]:
        """Return all ranks' times since the last record; collective."""
        steps, self._steps = max(1, self._steps), 0
        elapsed = time.perf_counter() - self._began
        own = RankTimes(elapsed / steps, data_seconds / steps, self._time_products())
        times = [own]
        if dist.is_initialized():
            mine = torch.tensor(own, dtype=torch.float64).to(self._device)
            gathered = mine.new_empty(dist.get_world_size() * len(own))  # gloo wants one dimension
            dist.all_gather_into_tensor(gathered, mine)
            times = [RankTimes(*row) for row in gathered.view(-1, len(own)).tolist()]
            if not self._hosts:
                self._hosts = [""] * len(times)
                dist.all_gather_object(self._hosts, socket.gethostname())
        self._began = time.perf_counter()
        slowest = max(range(len(times)), key=lambda rank: times[rank].products)
        record: dict[str, Any] = {
            "ranks/step_seconds_median": statistics.median(rank.step for rank in times),
            "ranks/step_seconds_max": max(rank.step for rank in times),
            "ranks/data_seconds_max": max(rank.data for rank in times),
            "ranks/products_ratio_max": times[slowest].products
            / statistics.median(rank.products for rank in times),
        }
        if (found := straggler(times, self._factor)) is not None:
            rank, reason = found
            host = f" on {self._hosts[rank]}" if self._hosts else ""
            record["straggler"] = f"rank {rank}{host} {reason}"
        return record

    def _time_products(self) -> float:
        began = time.perf_counter()
        product = self._matrix
        for _ in range(_ROUNDS):
            product = product @ self._matrix
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # costs nothing: the record waits, too
        return time.perf_counter() - began


def straggler(times: list[RankTimes], factor: float) -> tuple[int, str] | None:
    """Return the rank furthest above the median and the reason; None if it is below `factor`."""
    if len(times) < 2:
        return None
    found: list[tuple[float, int, str]] = []
    for name, said in (("products", "computes"), ("data", "waits for data")):
        values = [getattr(rank, name) for rank in times]
        usual = statistics.median_low(values)  # with two ranks, the faster one
        if name == "data":
            usual = max(usual, _LEAST_WAIT * statistics.median(rank.step for rank in times))
        rank = max(range(len(values)), key=values.__getitem__)
        if (ratio := values[rank] / max(usual, 1e-9)) >= factor:
            found.append((ratio, rank, f"{said} {ratio:.1f} times as long as the others"))
    return max(found)[1:] if found else None
