"""95 % intervals of measured numbers: over questions, and over seeds.

Sources: Wilson 1927, J. Am. Stat. Assoc. 22 (questions); Student 1908, Biometrika 6 (seeds). Where
seeds share documents, the half widths for seeds and for documents add in quadrature. Rejected: a
bootstrap of seeds, whose 95 % interval covers about 75 % for three seeds, and Satterthwaite's
degrees of freedom, by which a second source of noise can narrow an interval.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

_NORMAL = 1.959964


class Interval(NamedTuple):
    """An estimate and its interval, in the unit of the estimate."""

    value: float
    low: float
    high: float


def of_questions(share: float, questions: int) -> Interval:
    """Return a share of right answers with Wilson's interval, which holds at 0 and 1, too."""
    squared = _NORMAL**2 / questions
    middle = (share + squared / 2) / (1 + squared)
    variance_of_share = share * (1 - share) / questions + squared / (4 * questions)
    half = _NORMAL * math.sqrt(variance_of_share) / (1 + squared)
    # Rounding must not put a share of 0 or 1 outside its interval.
    return Interval(share, min(middle - half, share), max(middle + half, share))


def of_seeds(values: Sequence[float], shared_variance: float = 0.0) -> Interval:
    """Return the mean of seeds with Student's interval; a single seed has only the shared part.

    `shared_variance` is the mean's variance from a sample that all seeds share, such as documents.
    """
    from scipy.stats import t

    mean, squared_half = fmean(values), _NORMAL**2 * shared_variance
    if len(values) > 1:
        squared_half += float(t.ppf(0.975, len(values) - 1)) ** 2 * variance(values) / len(values)
    half = math.sqrt(squared_half)
    return Interval(mean, mean - half, mean + half)
