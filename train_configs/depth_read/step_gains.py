"""Changes from one recurrent step to another, by category, as a table of results.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 15: from loop 1 to loop 4 elementary
mathematics gains 156 % and formal logic 143 %, global facts 8 % and moral scenarios 8 %. Deviation:
every step over the one before, paired by seed and, on text, by document; the paper has one model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from titan_loop.analysis.results import Estimate, ResultTable, RunResult


@dataclass(frozen=True, kw_only=True)
class StepGains(ResultTable):
    """A cell is its number less the one of another column in the same row.

    Attributes:
        over: Column to subtract: the one before, so that the first column is empty; or the last,
            which then is empty.
    """

    over: Literal["before", "last"] = "before"

    def mean(self, results: Sequence[RunResult], row: str, column: str) -> Estimate | None:
        """Return the mean difference with its interval, and the number of seeds, if any."""
        steps = [*self.columns]
        before = steps[max(steps.index(column) - 1, 0)]
        other = steps[-1] if self.over == "last" else before
        if other == column:
            return None
        turned = replace(self, rows=self.columns, columns=self.rows, less=other)
        return turned.difference(results, column, row)
