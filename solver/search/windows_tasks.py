"""The ops that a window decides, as tasks of the constraint model, and the choice which activations leave."""

from __future__ import annotations

from optpipe.orders import Op
from solver.exact.cp_sat.variables import Moment, Task, Variables
from solver.search.windows_frame import AFTER, BEFORE, INSIDE, Frame


class Tasks:
    """Tasks in `variables` for every op of the activations that a window touches.

    `decided`: numbers of the ops whose start is open: those inside, and copies that may be added. The others stand
    where they are, those after the window `frame.far` later. `choices`: activations for which it is open whether they
    leave.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.numbering, self.around, self.problem = frame.numbering, frame.around, frame.problem
        self.variables = Variables(self.problem, self.numbering.grid, frame.far + 1)
        self.model = self.variables.model
        self.decided = set(frame.inside.tolist())
        self.choices: list[tuple[int, int]] = []
        ops = self.numbering.ops
        self.touched = sorted({ops[k][1:] for k in (*frame.inside.tolist(), *frame.running.tolist())})
        for s, i in self.touched:
            self._add(s, i)

    def of(self, k: int) -> Task:
        """The task of an op by number."""
        return self.variables.tasks[self.numbering.ops[k]]

    def _add(self, s: int, i: int) -> None:
        variables, frame = self.variables, self.frame
        self._add_leaves(s, i)
        for kind in "FBW" + ("OR" if (s, i) in variables.leaves else ""):
            op = Op(kind, s, i)
            k = self.numbering.index[op]
            if k in self.decided:
                presence = variables.leaves[s, i] if kind in "OR" else None
                variables.add_task(op, presence, int(frame.heads[k]), frame.latest_end(k))
            else:
                variables.place(op, int(self.around.start[k]) + (frame.far if frame.where[k] == AFTER else 0))

    def _add_leaves(self, s: int, i: int) -> None:
        """Whether an activation leaves: decided if all of its journey lies in the window."""
        if self.problem.stages[s].offload is None:
            return
        o, r, f, b = (self.numbering.index[Op(kind, s, i)] for kind in "ORFB")
        leaves = self.variables.leaves
        if self.around.present[o]:
            both_inside = self.frame.where[o] == INSIDE and self.frame.where[r] == INSIDE
            if both_inside and self._is_free(s, i):
                self._add_choice(s, i)
            else:
                leaves[s, i] = self.model.new_constant(1)
        elif (
            self._is_free(s, i)
            and self.frame.where[f] < AFTER
            and self.frame.where[b] > BEFORE
            and self.frame.may_leave(s, i)
        ):
            self._add_choice(s, i)
            for k in (o, r):
                self.decided.add(k)
                self.frame.heads[k] = self.frame.copy_head(k)
                self.frame.tails[:, k] = self.frame.copy_tails(k)

    def _add_choice(self, s: int, i: int) -> None:
        self.variables.leaves[s, i] = self.model.new_bool_var(f"leaves{s}.{i}")
        self.choices.append((s, i))

    def _is_free(self, s: int, i: int) -> bool:
        """Whether the activation's ops may change places."""
        return bool(self.frame.window.free[self.numbering.index[Op("F", s, i)]])

    def outside(self, moment: Moment) -> int | None:
        """Whether a moment lies before the window or after it (BEFORE, AFTER); None where the model decides."""
        k = self.numbering.index[moment.task.op]
        return None if k in self.decided else int(self.frame.where[k])

    def fixed(self, moment: Moment) -> int:
        """The time of a moment that is not decided, no earlier than the window's begin."""
        k = self.numbering.index[moment.task.op]
        at = int(self.around.end[k] if moment.is_end else self.around.start[k])
        return at + self.frame.far if self.frame.where[k] == AFTER else max(at, self.frame.window.begin)
