"""How the damages of two choices add up: more than their sum if their errors point the same way."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compressor.sensitivity.schema import Sensitivity


def cross_matrix(scan: Sensitivity, names: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
    """Interaction of each pair of ``names`` (unit, format), [names, names], symmetric, zero on the diagonal and
    for formats without error. A plan's KL is Σ damage + Σ over ordered pairs of this."""
    factor = np.asarray(scan.factor, dtype=np.float64).reshape(len(scan.factor), len(scan.columns))
    where = {column: index for index, column in enumerate(scan.columns)}
    rows = np.zeros((len(factor), len(names)))
    for position, name in enumerate(names):
        if name in where:
            rows[:, position] = factor[:, where[name]]
    cross = rows.T @ rows
    np.fill_diagonal(cross, 0.0)
    return cross
