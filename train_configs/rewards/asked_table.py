"""Tables of shares whose intervals hold seeds and questions.

The half widths add in quadrature: Student's over seeds, and the normal one of a sample of questions
that all seeds share. Two arms are asked the same questions, so leaving their covariance out of a
difference makes its interval too wide, never too narrow.
"""

from collections.abc import Sequence
from statistics import fmean

from titan_loop.analysis.results import Estimate, ResultTable, RunResult
from titan_loop.evaluation.intervals import Interval, of_seeds


class AskedTable(ResultTable):
    """A table of shares; every number TASK/METRIC/READING has TASK/METRIC_variance/READING."""

    def mean(self, results: Sequence[RunResult], row: str, column: str) -> Estimate | None:
        """Return a cell's mean with its interval, and the number of seeds, if any."""
        values = [*self.values(results, row, column).values()]
        if not values:
            return None
        found = of_seeds(values, self._of_questions(results, row, column))
        return Interval(found.value, max(found.low, 0.0), min(found.high, 100.0)), len(values)

    def difference(self, results: Sequence[RunResult], row: str, column: str) -> Estimate | None:
        """Return a cell less its column's in the row `less`, paired by seed."""
        own, other = (self.values(results, name, column) for name in (row, self.less))
        seeds = sorted(own.keys() & other.keys())
        if not seeds:
            return None
        shared = sum(self._of_questions(results, name, column) for name in (row, self.less))
        return of_seeds([own[seed] - other[seed] for seed in seeds], shared), len(seeds)

    def _of_questions(self, results: Sequence[RunResult], row: str, column: str) -> float:
        """Return the variance of a cell from the sample of questions, as shown."""
        name, runs = self.runs(results, row, column)
        task, metric, reading = name.split("/", 2)
        variance = f"{task}/{metric}_variance/{reading}"
        return self.factor**2 * fmean(run.results[variance] for run in runs)
