"""What is posted to have a problem solved, and the caps of this installation on it."""

from __future__ import annotations

from dataclasses import dataclass

from api.documents import read_document
from api.faults import unprocessable
from api.jobs.config import JobConfig
from api.settings import Settings
from optpipe.document import Document
from optpipe.problem import Problem
from solver.exact.milp.size import MOST_OPS as MOST_MILP_OPS
from solver.size import count_ops


class ProblemBody(Document):
    """A body with a problem alone."""

    problem: Problem


class SubmissionBody(Document):
    """A problem, and how it is to be solved."""

    problem: Problem
    config: JobConfig = JobConfig()


@dataclass(frozen=True)
class Caps:
    """What this installation takes at most."""

    max_ops: int
    max_time_limit_s: float
    max_workers: int

    @classmethod
    def of(cls, settings: Settings) -> Caps:
        """The caps among the settings."""
        return cls(settings.max_ops, settings.max_time_limit_s, settings.max_workers)

    def check_problem(self, problem: Problem) -> None:
        """Raise ProblemError where the problem is too large, before anything is built for it."""
        ops = count_ops(problem)
        if ops > self.max_ops:
            raise unprocessable(
                "too_many_ops",
                f"has {ops:,} ops, and this server takes at most {self.max_ops:,} (max_ops). "
                "Maybe solve fewer microbatches: a schedule repeats itself after its warm-up.",
                "/problem",
            )

    def check_config(self, problem: Problem, config: JobConfig) -> None:
        """Raise ProblemError where more time or threads are asked for than there are, or a model would be too large."""
        if config.time_limit_s > self.max_time_limit_s:
            raise _over("time_limit_s", config.time_limit_s, self.max_time_limit_s)
        if config.workers > self.max_workers:
            raise _over("workers", config.workers, self.max_workers)
        ops = count_ops(problem)
        if config.method == "milp" and ops > MOST_MILP_OPS:
            raise unprocessable(
                "model_too_large",
                f"is 'milp', which would build a model of {ops:,} ops, and its limit is {MOST_MILP_OPS:,}: it decides "
                "on every pair of them. Maybe use auto or cp-sat, or fewer microbatches.",
                "/config/method",
            )


def _over(name: str, asked: float, most: float) -> Exception:
    detail = f"is {asked:g} but this server allows at most {most:g} (max_{name})."
    return unprocessable("out_of_range", detail, f"/config/{name}")


def read_submission(body: bytes, caps: Caps) -> SubmissionBody:
    """A body checked whole and held to the caps. Raises ProblemError."""
    submission = read_document(SubmissionBody, body)
    caps.check_problem(submission.problem)
    caps.check_config(submission.problem, submission.config)
    return submission
