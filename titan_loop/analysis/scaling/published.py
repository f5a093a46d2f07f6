"""Scaling laws as data: published coefficients, and fits in a `scaling.json`, in one format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.analysis.scaling.fit import Fit
from titan_loop.analysis.scaling.law import LAWS, Losses, with_repeats
from titan_loop.analysis.scaling.study import FORMAT_VERSION
from titan_loop.errors import UserError, nearest
from titan_loop.storage.json_files import read_versioned_json

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "loop-moe": {
        "form": "bounded_sparse",
        "source": "Chen et al. 2026, arXiv 2609.40316; N without embeddings",
        "coefficients": {
            "E": 1.3555, "A": 0.8085, "alpha": 0.1951, "B": 3.4291, "beta": 0.7548,
            "delta": -0.1935, "gamma": 0.0137, "omega": -0.2056, "zeta": -0.0881,
            "E_start": 1.3174, "E_max": 57.1201,
            "kappa1": 0.3682, "kappa2": 1.4037, "theta": 0.3286,
        },
        "range": {"parameters": [0.3e9, 1.0e9], "tokens": [100e9, 500e9],
            "recurrent_steps": [1, 8], "experts": [1, 16]},
    },
}  # fmt: skip
"""Name on the command line → record, as in a `scaling.json`."""


@dataclass(frozen=True)
class NamedLaw:
    """A law with all its coefficients.

    Attributes:
        range: Smallest and largest parameters, tokens, recurrent_steps and experts of the points.
    """

    name: str
    fit: Fit
    range: Mapping[str, tuple[float, float]]

    def outside(self, **values: float) -> list[str]:
        """Return, as text, the ranges that `values` lie outside; empty for an interpolation."""
        found: list[str] = []
        for name, value in values.items():
            low, high = self.range.get(name, (value, value))
            if not low <= value <= high:
                found.append(f"{name} {low:.3g} to {high:.3g}")
        return found


def read_law(text: str) -> NamedLaw:
    """Return a published law by its name, or a law of a `scaling.json` by FILE[:FORM].

    Without FORM, it is the law that `titan-loop scaling` chose.
    """
    if text in PUBLISHED:
        return _named(text, PUBLISHED[text])
    path, _, form = text.partition(":") if not Path(text).exists() else (text, "", "")
    fix, forms = "write it with titan-loop scaling", []
    try:
        record = read_versioned_json(Path(path), format_version=FORMAT_VERSION, fix=fix)
        forms = [law["form"] for law in record["laws"]]
        wanted = [
            law for law in record["laws"] if (law["form"] == form if form else law.get("chosen"))
        ]
        return _named(text, wanted[0])
    except FileNotFoundError as error:
        known = ", ".join(PUBLISHED)
        raise UserError(
            f"law={path} is neither a file nor a published law ({known}){nearest(path, PUBLISHED)}"
        ) from error
    except (IndexError, KeyError, TypeError, ValueError) as error:
        which = f"law of the form {form}" if form else "chosen law"
        if forms:
            fix = f"name one as {path}:FORM, with FORM one of {', '.join(dict.fromkeys(forms))}"
        raise UserError(f"law={path} has no {which}; {fix}") from error


def _named(name: str, record: Mapping[str, Any]) -> NamedLaw:
    law, given = LAWS[record["form"]], record["coefficients"]
    if "reuse" in given:
        law = with_repeats(law)
    values = {each: float(given[each]) for each in law.coefficients}
    limits = {each: (float(low), float(high)) for each, (low, high) in record["range"].items()}
    return NamedLaw(name, Fit(law, values, float(record.get("rmse", "nan"))), limits)


def predicted(law: NamedLaw, **model: float | None) -> float:
    """Return the loss of one model in nats per token; arguments as in `Losses.unmeasured`."""
    given = {name: value for name, value in model.items() if value is not None}
    return float(law.fit.predict(Losses.unmeasured(**given))[0])
