"""The prompt of every document as a batch column, for models that read it in both directions.

A document's prefix is its tokens before the first answer, up to and including the token that
predicts the answer's first. A document that is all answer has a prefix of one token, which changes
nothing: that token has only itself to read.
"""

from torch import Tensor

from titan_loop.data.columns import Column
from titan_loop.data.labels import IGNORED
from titan_loop.models.context import PREFIX

PREFIX_COLUMN = Column(name=PREFIX, reader="model", dtype="bool")
"""Whether a token belongs to its document's prefix."""


def prefix_of(positions_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the column, (B, L), from positions that restart with every document, and labels."""
    labelled_BL = (labels_BL != IGNORED).long()
    before_BL = labelled_BL.cumsum(dim=1) - labelled_BL
    # Labels before the token's document began; their number never falls.
    starts_BL = before_BL.masked_fill(positions_BL != 0, 0).cummax(dim=1).values
    return before_BL == starts_BL
