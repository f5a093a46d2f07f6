"""Scaling laws as data: published coefficients, and fits in a `scaling.json`, in one format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        "grid": {"parameters": [0.3e9, 0.6e9, 1.0e9, 1.6e9, 2.5e9],
            "recurrent_steps": [1, 2, 3, 4, 6, 8], "experts": [1, 2, 4, 8, 16]},
    },
    "iso-depth": {
        "form": "power",
        "source": "Schwethelm et al. 2026, arXiv 2604.21106, Table 2; N without embeddings",
        "coefficients": {"E": 1.57, "alpha": 0.199, "beta": 0.369, "phi": 0.459},
        "range": {"parameters": [10.9e6, 1136.5e6], "tokens": [0.34e9, 7.78e9],
            "recurrent_steps": [1, 8], "experts": [1, 1]},
    },
    "ouro": {
        "form": "additive",
        "source": "Zhu et al. 2025, arXiv 2510.25741, Appendix D: R² 0.9596",
        "coefficients": {},
        "range": {"parameters": [53e6, 1.364e9], "tokens": [0, 20e9],
            "recurrent_steps": [2, 8], "experts": [1, 1]},
    },
}  # fmt: skip
"""Name on the command line → record. `read_law` refuses laws whose paper lacks coefficients."""


@dataclass(frozen=True)
class NamedLaw:
    """A law with all its coefficients.

    Attributes:
        fit: The law; its rmse is NaN where the source has none.
        range: Smallest and largest parameters, tokens, recurrent_steps and experts of the points.
        grid: Values of these in the source's own tables; empty if it has none.
    """

    name: str
    fit: Fit
    source: str
    range: Mapping[str, tuple[float, float]]
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)

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
    law = LAWS[record["form"]]
    if "reuse" in record["coefficients"]:
        law = with_repeats(law)
    if missing := [each for each in law.coefficients if each not in record["coefficients"]]:
        raise UserError(
            f"law={name}: its source publishes no {', '.join(missing)} ({record['source']}), so it "
            "cannot predict a loss; use another, or fit your own with titan-loop scaling"
        )
    values = {each: float(record["coefficients"][each]) for each in law.coefficients}
    limits = {each: (float(low), float(high)) for each, (low, high) in record["range"].items()}
    rmse = float(record.get("rmse", "nan"))
    return NamedLaw(name, Fit(law, values, rmse), record["source"], limits, record.get("grid", {}))


def predicted(law: NamedLaw, **model: float | None) -> float:
    """Return the loss of one model in nats per token; arguments as in `Losses.unmeasured`."""
    given = {name: value for name, value in model.items() if value is not None}
    return float(law.fit.predict(Losses.unmeasured(**given))[0])
