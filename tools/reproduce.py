"""Writes train_configs/REPRODUCE.md: the claims of train_configs/*/claims.py and the results.

    python -m tools.reproduce [--check]

Intervals are of Student's t over seeds, paired where a claim has two numbers. A claim is shown if
three seeds or more were run and their whole interval meets the aim, partly if only their mean does,
and undecided, too, if the aim is within the interval.
With --check nothing is written, and another file than the committed one is an error.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_loop.analysis.results import UNCLEAN, RunResult
from titan_loop.errors import UserError
from titan_loop.evaluation.intervals import of_seeds
from train_configs.claims import Cell, Claim

ROOT = Path("train_configs")
ENOUGH_SEEDS = 3

HEADER = """# What is reproduced, and what is not

Written by `python -m tools.reproduce` from each folder's `claims.py` and `results/`; do not edit.
Papers: 000 DiscoLoop, 001 recurrent depth, 002 Ouro, 003 latent reasoning, 004 adaptive loops; a
dash marks a claim of this project, or of the paper that the remark names. A line without numbers
gives paper, command and the remarks of all rows below it. Everything but SmolLM2-135M is small:
10^4 to 10^6 parameters, trained on a CPU or, if its JSON says so, on one H200. Ours is the mean
over seeds with its 95 % interval (Student's t), of two arms the difference seed by seed; questions
and documents add nothing to it. Aims are ours and were set before the runs, unless the remark says
otherwise; theirs is the paper's number, sometimes in another measure. A command that is a script
skips committed results and may have fewer seeds than its row: `--again --seeds "1 2 3"` trains them
anew in `runs/results-again`. `titan-loop train` trains one seed, `--debug.seed S --dataloader.seed
S`, and `titan-loop results add RUN` records it. Minutes are wall-clock time of the final runs on
shared cores, without first stages and searches. `bash tools/claims_gpu.sh` trains more seeds of the
undecided claims. *Shown*: three seeds or more, and the whole interval meets the aim. *Partly*: the
mean meets it, but not the whole interval, or fewer seeds were run. *Not*: the mean
misses it. *Undecided*: the aim is within the interval. *No test*: the experiment cannot decide. †
marks claims that include a run from uncommitted code, or from a commit not in the history.

| claim | theirs | aim | ours | seeds | verdict | minutes | remark |
|---|---|---|---|---|---|---|---|
"""


def cells_of(claim: Claim, results: Sequence[RunResult]) -> Sequence[Cell]:
    """Return the claim's cells; none if it chooses them by results that are not complete."""
    return claim.cells(results) if callable(claim.cells) else claim.cells


def numbers(claim: Claim, results: Sequence[RunResult]) -> dict[int, float]:
    """Return seed → the claim's number, for the seeds that have all of its cells."""
    cells = cells_of(claim, results)
    found = [
        {r.seed: r for r in results if r.stage == cell.stage and cell.name in r.results}
        for cell in cells
    ]
    seeds = sorted(set.intersection(*map(set, found))) if found else []
    runs = [
        (each[seed], cell.name) for seed in seeds for cell, each in zip(cells, found, strict=True)
    ]
    if len({run.units[name][0] for run, name in runs if name in run.units}) > 1:
        raise UserError(
            f"{claim.recipe}: {claim.text}: its runs were scored on different documents"
        )
    values = {
        seed: [each[seed].results[cell.name] for cell, each in zip(cells, found, strict=True)]
        for seed in seeds
    }
    return {seed: claim.factor * _number(*numbers) for seed, numbers in values.items()}


def _number(first: float, second: float | None = None, third: float | None = None) -> float:
    if second is None:
        return first
    return first - second if third is None else (first - second) / (first - third)


def verdict(claim: Claim, values: Sequence[float]) -> str:
    """Return shown, partly, not, or no test; undecided if the interval holds the aim."""
    if not claim.is_test:
        return "no test"
    mean, low, high = of_seeds(values)
    least = -math.inf if claim.at_least is None else claim.at_least
    most = math.inf if claim.at_most is None else claim.at_most
    if len(values) >= ENOUGH_SEEDS and least <= low and high <= most:
        return "**shown**"
    word = "partly" if least <= mean <= most else "not"
    is_open = any(low < bound < high for bound in (least, most))
    return f"{word}, undecided" if is_open else word


def row(claim: Claim, results: Sequence[RunResult], remark: str = "") -> str:
    """Return a line of the table, of a claim with at least one seed."""
    by_seed = numbers(claim, results)
    values = list(by_seed.values())
    digits = 1 if claim.factor > 1 else 3
    mean, low, high = of_seeds(values)
    ours = f"{mean:.{digits}f}"
    if len(values) > 1:
        if claim.unit == "%" and len(cells_of(claim, results)) == 1:  # a share of answers
            low, high = max(low, 0.0), min(high, 100.0)
        ours += f" [{low:.{digits}f}, {high:.{digits}f}]"
    bounds = [
        f"{sign} {value:g}"
        for sign, value in (("≥", claim.at_least), ("≤", claim.at_most))
        if value is not None
    ]
    stages = {cell.stage for cell in cells_of(claim, results)}
    runs = [r for r in results if r.stage in stages and r.seed in by_seed]
    seconds = sum(r.seconds for r in runs)
    mark = f" {UNCLEAN}" * any(r.unclean for r in runs)
    cells = (
        claim.text, claim.theirs or "–", f"{', '.join(bounds)} {claim.unit}", ours,
        f"{len(values)}{mark}", verdict(claim, values), f"{seconds / 60:.0f}",
        remark,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _remarks(claim: Claim) -> list[str]:
    return [remark for remark in claim.note.split("; ") if remark]


def page() -> str:
    """Return the whole file; a claim without a seed that has all of its results has no row."""
    claims = [
        claim
        for path in sorted(ROOT.glob("*/claims.py"))
        for claim in importlib.import_module(f"train_configs.{path.parent.name}.claims").CLAIMS
    ]
    asked = {claim.recipe for claim in claims}
    folders = {path.name: path for path in ROOT.glob("*/results/*") if path.name in asked}
    results = {name: RunResult.all_of(path) for name, path in folders.items()}
    groups: dict[tuple[str, str], list[Claim]] = {}
    for claim in sorted(claims, key=lambda claim: claim.paper):
        if numbers(claim, results.get(claim.recipe, [])):
            groups.setdefault((claim.paper, claim.command), []).append(claim)
    rows = []
    for (paper, command), group in groups.items():
        remarks = [_remarks(claim) for claim in group]
        said = [
            remark
            for remark in remarks[0]
            if len(group) > 1 and all(remark in others for others in remarks)
        ]
        heading = f"**{paper}** `{command}`"
        rows.append(f"| {': '.join(filter(None, (heading, '; '.join(said))))} |")
        above = ""
        for claim in group:
            own = "; ".join(remark for remark in _remarks(claim) if remark not in said)
            remark = "as above" if own and own == above else own
            rows.append(row(claim, results[claim.recipe], remark))
            above = own
    return HEADER + "\n".join(rows) + "\n"


def main() -> None:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    path = ROOT / "REPRODUCE.md"
    check = parser.parse_args().check
    try:
        text = page()
    except UserError as error:
        sys.exit(f"titan-loop: error: {error}")
    if not check:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        sys.exit(f"{path} disagrees with the results; run python -m tools.reproduce")


if __name__ == "__main__":
    main()
