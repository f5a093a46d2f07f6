"""Losses to fit a scaling law to, from run directories or from a CSV file.

A run's logged losses are averaged over 20 equal stretches of tokens. Each gives a point, except the
first, since warm-up follows no law.
"""

import csv
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from titan_loop.analysis.scaling.law import Losses, model_sizes
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import read_plan

logger = logging.getLogger(__name__)

STRETCHES = 20
_COLUMNS = {item.name: item.name for item in fields(Losses)} | {
    "steps": "recurrent_steps",
    "looped": "looped_parameters",
}
"""Field of `Losses` → column of a CSV file."""


def read_csv(path: Path) -> Losses:
    """Read the points of a CSV file that has the columns of `write_csv`, and perhaps others.

    A row with a `step` is a loss after that recurrent step, which no law describes; it is left out.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader if not row.get("step")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"csv={path} cannot be read ({error}); give a CSV file") from error
    if missing := sorted({*_COLUMNS.values()} - {*(reader.fieldnames or ())}):
        raise UserError(
            f"csv={path} lacks the columns {', '.join(missing)}; it needs "
            f"{', '.join(_COLUMNS.values())}"
        )
    if not rows:
        raise UserError(f"csv={path} has no rows below its header; add measured losses")
    return Losses.of(
        [
            {
                field: row[column]
                if column == "run"
                else _positive(f"csv={path} line {line}", column, row[column] or "")
                for field, column in _COLUMNS.items()
            }
            for line, row in rows
        ]
    )


def write_csv(points: Losses, path: Path) -> None:
    """Write the points in the columns that `read_csv` reads."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS.values())
        columns = (getattr(points, field).tolist() for field in _COLUMNS)
        writer.writerows(zip(*columns, strict=True))


def read_runs(folders: Sequence[Path]) -> Losses:
    """Read points from run directories and from the stages of recipe folders.

    A recipe's control stages are left out; to fit them, too, name their run directories. All runs
    must have trained on the same data, each at a constant R.
    """
    points: list[dict[str, Any]] = []
    first: tuple[Path, Any] | None = None
    for folder in _runs(folders):
        data = _trained_on(SavedRun(folder))
        if first is None:
            first = folder, data
        elif data != first[1]:
            raise UserError(
                f"{folder} and {first[0]} were trained on different data ({data} and {first[1]}); "
                "one fit needs one mixture and one tokenizer, so fit them separately"
            )
        points += _points(folder)
    return Losses.of(points)


def _runs(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        plan = read_plan(folder)
        if not plan:
            yield folder
            continue
        controls = {stage.name for stage in plan if stage.control}
        stages = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        if left_out := [stage.name for stage in stages if stage.name in controls]:
            logger.info("%s: left out the controls %s", folder, ", ".join(left_out))
        yield from (stage for stage in stages if stage.name not in controls)


def _trained_on(run: SavedRun) -> str:
    """Return as JSON the data settings in which runs must agree to be fitted together."""
    described = run.checkpoint().manifest["data"].get("data", {})
    kept = {name: value for name, value in described.items() if name not in ("seed", "seq_len")}
    if "sources" in kept:  # the same data may lie in another folder
        kept["sources"] = [
            {name: source[name] for name in ("contents", "share")} for source in kept["sources"]
        ]
    return json.dumps(kept, sort_keys=True)


def _points(folder: Path) -> Iterator[dict[str, Any]]:
    from titan_loop.models.family import decoder_config  # slow: imports torchtitan

    run = SavedRun(folder)
    records = RunDirectory(folder).read_metrics()
    depths = {record["recurrent_steps"] for record in records}
    if len(records) < 2 * STRETCHES:
        raise UserError(
            f"{folder} has {len(records)} records in metrics.jsonl; the fit averages them over "
            f"{STRETCHES} stretches of tokens, so log at least {2 * STRETCHES} times"
        )
    if len(depths) != 1 or not all(isinstance(depth, int) for depth in depths):
        raise UserError(
            f"{folder} trained with R = {', '.join(map(str, sorted(depths)))}; a point of the fit "
            "needs one R, so give runs with a constant R"
        )
    (steps,) = depths
    model = decoder_config(run.model_options, max_seq_len=run.seq_len)
    size: dict[str, Any] = {"run": str(folder), "width": model.dim, **model_sizes(model)}
    tokens = np.array([record["tokens"] for record in records], dtype=np.float64)
    ends = np.linspace(0, tokens[-1], STRETCHES + 1)[1:-1]
    edges = np.searchsorted(tokens, ends, side="right")
    stretches = [group for group in np.split(np.arange(len(records)), edges)[1:] if len(group)]
    for stretch in stretches:
        losses = [records[index]["loss"] for index in stretch]
        if None in losses:  # null stands for a loss that was not finite
            continue
        trained = {"steps": steps, "tokens": float(np.mean(tokens[stretch]))}
        yield {**size, **trained, "loss": float(np.mean(losses))}


def _positive(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise UserError(
            f"{where}: {name}={text!r} must be a positive number; correct it or remove the row"
        )
    return value
