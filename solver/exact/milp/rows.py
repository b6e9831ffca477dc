"""Rows of a linear program, gathered in blocks of numpy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from solver.exact.milp.variables import Table
from solver.exact.milp.windows import Bools, Floats, Ints

NO_COLUMN = -1


class Rows:
    """Rows ``terms >= lower`` under construction; all are written with that sense."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.columns: list[Ints] = []
        self.values: list[Floats] = []
        self.lower: list[Floats] = []
        self.count = 0

    def block(self, lower: Floats) -> Block:
        """Add one row for each entry of `lower`."""
        block = Block(self, np.arange(self.count, self.count + len(lower)), np.array(lower, np.float64))
        self.count += len(lower)
        self.lower.append(block.lower)
        return block

    def matrix(self, columns: int) -> tuple[csr_matrix, Floats]:
        """The coefficients, duplicates added up, and the lower bounds of the rows."""
        rows, cols, values = (np.concatenate(parts) for parts in (self.rows, self.columns, self.values))
        matrix = csr_matrix((values, (rows, cols)), shape=(self.count, columns))
        matrix.eliminate_zeros()
        return matrix, np.concatenate(self.lower)


class Block:
    """Rows that are being filled: each call adds one term to every row."""

    def __init__(self, target: Rows, rows: Ints, lower: Floats) -> None:
        self.target, self.rows, self.lower = target, rows, lower

    def term(self, columns: Ints | int, values: Floats | float, only: Bools | bool = True) -> Block:
        """Add ``values * columns``, one column a row, in the rows where `only` holds."""
        keep = np.broadcast_to(only, self.rows.shape)
        self.target.rows.append(self.rows[keep])
        self.target.columns.append(np.broadcast_to(columns, self.rows.shape)[keep].astype(np.int64))
        self.target.values.append(np.broadcast_to(values, self.rows.shape)[keep].astype(np.float64))
        return self

    def choice(self, table: Table, a: Ints, b: Ints, values: Floats | float) -> Block:
        """Add ``values * table[a, b]``; the part that is known goes to the other side."""
        self.lower -= values * table.constant[a, b]
        return self.term(table.column[a, b], values * table.slope[a, b], table.column[a, b] >= 0)

    def choices(self, table: Table, a: Ints, b: Ints, values: NDArray[np.float64]) -> Block:
        """Add to row k the sum over j of ``values[j] * table[a[j], b[k]]``; here b is an op for each row."""
        at = np.ix_(a, b)
        self.lower -= values @ table.constant[at]
        for j in range(len(a)):
            self.term(table.column[at][j], values[j] * table.slope[at][j], table.column[at][j] >= 0)
        return self
