"""How the damages of two choices add up: more than their sum if their errors point the same way.

The interaction of a pair is estimated from the same passes as its damages, but it is a small difference of large
terms, and an optimizer that may choose among thousands of them finds those that are low by chance. So they
are shrunk by n / (n + 32), n the sequences of the scan: by half at the default of 32 sequences, where full
interactions predict random plans best but cost chosen plans a fifth of their predicted KL.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compressor.sensitivity.schema import Sensitivity

_SEQUENCES = 32  # of a scan whose interactions count half


def cross_matrix(scan: Sensitivity, names: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
    """Interaction of each pair of ``names`` (unit, format), [names, names], symmetric, zero on the diagonal and
    for formats without error, shrunk as the module says. A plan's KL is Σ damage + Σ over ordered pairs of this."""
    factor = np.asarray(scan.factor, dtype=np.float64).reshape(len(scan.factor), len(scan.columns))
    where = {column: index for index, column in enumerate(scan.columns)}
    rows = np.zeros((len(factor), len(names)))
    for position, name in enumerate(names):
        if name in where:
            rows[:, position] = factor[:, where[name]]
    cross = rows.T @ rows * (scan.sequences_used / (scan.sequences_used + _SEQUENCES))
    np.fill_diagonal(cross, 0.0)
    return cross
