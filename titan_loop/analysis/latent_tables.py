"""Tables of what `latent_circuits` finds, for the terminal and the report."""

from collections.abc import Mapping
from typing import Any


def places(operands: int) -> list[str]:
    """Return what names and groups of an equation are called: its operands, then its result."""
    return [*(f"operand {number + 1}" for number in range(operands)), "result"]


def circuit_tables(record: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return title → rows, the header first; a table without rows is left out.

    Args:
        record: Fields of `Circuits` and `errors`, as `evals/circuits-step-N.json` has them.
    """
    named = places(len(record["value_groups"]))
    heads = [["heads that belong to", *named]]
    for name in ("name", "value"):
        groups = [" ".join(map(str, group)) or "-" for group in record[f"{name}_groups"]]
        heads.append([f"{name}s", *groups, *[""] * (len(named) - len(groups))])
    gains = [["norm amplification", *next(iter(record["amplification"].values()), {})]]
    for group, factors in record["amplification"].items():
        gains.append([group, *(f"{value:.2f}" for value in factors.values())])
    norms = [["mean norm of the DFT", *next(iter(record["frequencies"].values()))]]
    for site, patterns in record["frequencies"].items():
        norms.append([site, *(f"{value:.3g}" for value in patterns.values())])
    errors = [["equations", *record["errors"]], ["count", *map(str, record["errors"].values())]]
    tables = {
        "Heads by what moves them": heads,
        "What heads of a group pass on": gains,
        "Frequencies of the last layer": norms,
        "What went wrong": errors,
    }
    return {title: rows for title, rows in tables.items() if len(rows) > 1}
