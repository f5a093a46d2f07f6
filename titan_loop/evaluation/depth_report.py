"""Bits per byte of a checkpoint by depth, and of its baselines: `evals/depth-step-N.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation.bits_per_byte import (
    bits_per_byte,
    bootstrap_bits_per_byte,
    paired_difference,
)
from titan_loop.evaluation.intervals import Interval
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import (
    DamagedFileError,
    count,
    number,
    read_json_object,
    write_json,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSums:
    """Bytes, and nats at each R, of every unit of the bootstrap: a document or a window."""

    n_bytes: list[int]
    nats: dict[int, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDepths:
    """Results of one source, or of all sources together.

    Attributes:
        depths: Recurrent steps → bits per byte with its interval.
        baselines: Name ("unigram", "bigram") → bits per byte.
        changes: Recurrent steps → bits per byte minus the shallowest depth's, on the same units.
    """

    depths: dict[int, Interval]
    baselines: dict[str, float]
    windows: int
    n_bytes: int
    changes: dict[int, Interval]
    units: UnitSums


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthReport:
    """Bits per byte against depth.

    Attributes:
        baseline_tokens: Number of tokens the baselines were fitted on.
        ema: Whether the average of the weights was scored; such a report has a file of its own.
    """

    step: int
    tokens: int
    trained_recurrent_steps: int
    sources: dict[str, SourceDepths]
    baseline_tokens: int
    ema: bool = False

    def save(self, run_directory: RunDirectory) -> Path:
        """Write `evals/depth-step-N.json`, or `depth-ema-step-N.json`, and return its path."""
        kind = "depth-ema" if self.ema else "depth"
        path = run_directory.evaluations / f"{kind}-step-{self.step}.json"
        write_json(path, asdict(self))
        return path

    @classmethod
    def load(cls, path: Path) -> "DepthReport":
        """Read a file that `save` wrote; raise `UserError` if it is damaged."""
        fix = "evaluate again"
        record = read_json_object(path, fix=fix)
        try:
            sources = {
                name: SourceDepths(
                    depths=_intervals(fields["depths"]),
                    changes=_intervals(fields["changes"]),
                    baselines={kind: number(bits) for kind, bits in fields["baselines"].items()},
                    windows=count(fields["windows"]),
                    n_bytes=count(fields["n_bytes"]),
                    units=_unit_sums(fields["units"]),
                )
                for name, fields in record.pop("sources").items()
            }
            for source in sources.values():
                _require_every_depth(source)
            for name in ("step", "tokens", "trained_recurrent_steps", "baseline_tokens"):
                count(record[name])
            return cls(sources=sources, **record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(path, repr(error), fix) from error

    @classmethod
    def latest(cls, run_directory: RunDirectory) -> "DepthReport":
        """Return the last step's report, never an EMA one; raise `UserError` if there is none."""
        paths = {
            int(path.stem.rpartition("-")[2]): path
            for path in run_directory.evaluations.glob("depth-step-*.json")
        }
        if not paths:
            folder = str(run_directory.evaluations)
            raise UserError(f"{folder!r} has no depth-step-N.json; evaluate the run first")
        return cls.load(paths[max(paths)])


def _intervals(recorded: Mapping[str, Sequence[float]]) -> dict[int, Interval]:
    return {int(depth): Interval(*map(number, triple)) for depth, triple in recorded.items()}


def _require_every_depth(source: SourceDepths) -> None:
    if source.changes.keys() != source.depths.keys():
        raise ValueError(f"changes at {[*source.changes]}, depths {[*source.depths]}")
    units = source.units
    lengths = {len(nats) for nats in units.nats.values()}
    if units.nats.keys() != source.depths.keys() or lengths != {len(units.n_bytes)}:
        raise ValueError("units lack a depth or a number")


def _unit_sums(recorded: Mapping[str, Any]) -> UnitSums:
    return UnitSums(
        n_bytes=[count(n_bytes) for n_bytes in recorded["n_bytes"]],
        nats={int(depth): [*map(number, nats)] for depth, nats in recorded["nats"].items()},
    )


def require_gain(report: DepthReport, share: float, *, baseline: str = "unigram") -> None:
    """Raise `RunFailedError` unless bits per byte are at least `share` below a baseline's.

    The report's last source, which is all text together, is judged at the trained R.
    """
    name, source = list(report.sources.items())[-1]
    depth = report.trained_recurrent_steps
    if baseline not in source.baselines:
        raise UserError(f"--beats-{baseline} needs a run that has read prepared sources")
    expected = source.baselines[baseline]
    if depth not in source.depths:
        raise UserError(f"--beats-{baseline} needs the trained R = {depth} among --depths")
    bits = source.depths[depth].value
    if not bits <= (1 - share) * expected:
        raise RunFailedError(
            f"{bits:.3f} bits per byte ({name}, R = {depth}) are {1 - bits / expected:.1%} below "
            f"the {baseline} model's {expected:.3f}, not the {share:.0%} asked for; train longer, "
            "or look for the cause in the run's plots"
        )


def summarise_source(
    depths: Sequence[int],
    nats_RU: ArrayLike,
    bytes_U: ArrayLike,
    baseline_nats: Mapping[str, float],
    *,
    windows: int,
) -> SourceDepths:
    """Return the results of one source.

    Args:
        nats_RU: (R, U) summed negative log likelihood of every unit at each of the depths.
        bytes_U: (U,) bytes that each unit predicts.
        baseline_nats: Name → summed negative log likelihood over all units.
    """
    nats_RU, bytes_U = np.asarray(nats_RU, dtype=np.float64), np.asarray(bytes_U)
    intervals = bootstrap_bits_per_byte(nats_RU, bytes_U)
    first = depths.index(min(depths))
    return SourceDepths(
        depths=dict(zip(depths, intervals, strict=True)),
        changes={
            depth: paired_difference(nats_U, nats_RU[first], bytes_U)
            for depth, nats_U in zip(depths, nats_RU, strict=True)
        },
        baselines={name: bits_per_byte(nats, bytes_U) for name, nats in baseline_nats.items()},
        windows=windows,
        n_bytes=round(float(np.sum(bytes_U))),
        units=UnitSums(
            n_bytes=bytes_U.tolist(),
            nats=dict(zip(depths, np.round(nats_RU, 2).tolist(), strict=True)),
        ),
    )
