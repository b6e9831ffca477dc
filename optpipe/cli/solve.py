"""`optpipe solve`: a problem in, a verified schedule out; and `optpipe methods`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import (
    AsJson,
    compile_meanwhile,
    compile_once,
    ctrl_c_cancels,
    doing,
    parse_size,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.errors import InputError, Issue, NoSolutionError
from optpipe.files import check_writable, write_atomically
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.client import Progress as ServerProgress
    from optpipe.client import ServerResult
    from optpipe.ops import Orders
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from solver.limits import Limits
    from solver.process import ChildResult, Heartbeat
    from solver.solution import Progress, Solution


TimeLimit = Annotated[float, typer.Option("--time-limit", min=0.01, max=1e6, help="Seconds to search.")]

SEARCH = "The search"
"""Panel of the help with the options that say how long and how hard to search."""

TIME_LIMIT_S = 30.0
"""How long a search takes at most, unless told otherwise."""

MEMORY_SHARE = 0.8
"""How much of the memory that is free a search may take, unless told otherwise."""


def command(
    problem: Annotated[Path, typer.Argument(help="A problem file (optpipe.problem/1).", metavar="PROBLEM.json")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="Write the schedule here; - for stdout.", metavar="SCHEDULE.json"),
    ] = None,
    method: Annotated[str, typer.Option(help="One of `optpipe methods`.")] = "auto",
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.01, max=1e6, help=f"Seconds to search; default: {TIME_LIMIT_S:g}.", rich_help_panel=SEARCH),
    ] = None,
    deterministic_limit: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1e6,
            metavar="WORK",
            rich_help_panel=SEARCH,
            help="Work to do instead of a time limit: the same schedule, byte for byte, in every run. A unit takes one "
            "core a second or a few.",
        ),
    ] = None,
    gap: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Stop at (value - bound) / value of this.", rich_help_panel=SEARCH),
    ] = 0.0,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Threads; default: all cores; on a server, and with --deterministic-limit, one.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the search.", rich_help_panel=SEARCH)] = 0,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory of the search, such as 8GiB; default: 80 % of what is free.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use and keep what was solved before.")] = True,
    server: Annotated[
        str | None, typer.Option(help="Have this server solve it, such as http://host:8000.", metavar="URL")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPTPIPE_KEY", help="Bearer key for the server.", show_envvar=True)
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Find a schedule: the order of every op on every device, and what is offloaded when, within every budget.

    Progress goes to stderr, a summary to stdout. Ctrl-C stops the search and keeps the best schedule so far.

    With --deterministic-limit the same problem, seed and limit give the same file in every run, however busy the
    machine is: one thread searches, work is counted instead of time, and the cache is neither asked nor filled. The
    schedule's solve_seconds is then the work allowed. Ctrl-C and the memory limit still end the search early.
    """
    from optpipe.problem import Problem
    from solver.limits import Limits, available_cores

    if output is not None and output != "-":
        check_writable(Path(output))
    loaded = Problem.load(problem)
    if deterministic_limit is None:
        time_limit_s = time_limit or TIME_LIMIT_S
        allowed = f"{time_limit_s:g} s"
    else:
        _refuse_with_deterministic_limit(time_limit, method, workers, server)
        time_limit_s, workers, cache = float("inf"), 1, False
        allowed = f"{deterministic_limit:g} unit{'' if deterministic_limit == 1 else 's'} of work"
    what = f"{loaded.name or problem.name} with {method} for up to {allowed}"
    result: ChildResult | ServerResult
    if server is not None:
        _refuse_local_options(memory_limit, cache)
        limits = Limits(time_limit_s, gap, workers or 1, seed)
        with doing(f"{server} solves {what}"):
            result = _solve_on(server, key, loaded, method, limits)
    else:
        if deterministic_limit is None:
            compile_meanwhile(loaded)
        else:
            compile_once()  # which searches run when must not depend on it
        limits = Limits(time_limit_s, gap, workers or available_cores(), seed, deterministic_limit=deterministic_limit)
        result = _solve_here(loaded, method, limits, memory_limit, output, cache, what)
    try:
        schedule = result.schedule_or_error()
    except NoSolutionError:
        if limits.cancel.requested:
            raise KeyboardInterrupt from None  # there was no time to find anything: it is the interruption that counts
        raise
    interrupted = limits.cancel.requested
    _write(schedule, output)
    if output == "-":
        pass  # what is on stdout already is all that belongs there
    elif as_json:
        limit = "work" if deterministic_limit is not None and result.limit == "time" else result.limit
        print_json(schedule.figures() | {"output": output, "interrupted": interrupted, "limit": limit})
    else:
        took = f"{schedule.solve_seconds:.2f} s" if deterministic_limit is None else f"at most {allowed}"
        _print_summary(schedule, took, output)
    return 130 if interrupted else 0


def _solve_here(
    problem: Problem,
    method: str,
    limits: Limits,
    memory_limit: int | None,
    output: str | None,
    cache: bool,
    what: str,
) -> ChildResult:
    """A solve on this machine, or what the cache knows."""
    from solver.process import solve_cached

    def solve(starts: Sequence[Orders]) -> ChildResult:
        with doing(f"solving {what}"):
            return _solve(problem, method, limits, memory_limit, output, starts)

    result = solve_cached(problem, method, limits, solve) if cache else solve([])
    if result.from_cache:
        stderr().print("an equal problem was solved before (--no-cache solves it again)")
    return result


def _refuse_with_deterministic_limit(
    time_limit: float | None, method: str, workers: int | None, server: str | None
) -> None:
    """Raise InputError for each option with which two runs could end differently."""
    issues = []
    if time_limit is not None:
        detail = "ends a search by the clock, which --deterministic-limit does not read. Maybe leave one of them out."
        issues.append(Issue("--time-limit", "not_deterministic", detail))
    if method == "milp":
        detail = "is milp, whose solver HiGHS keeps to a time but counts no work. Maybe take cp-sat."
        issues.append(Issue("--method", "not_deterministic", detail))
    if workers not in (None, 1):
        detail = f"is {workers}, but only a search by 1 gives the same schedule in every run. Maybe leave it out."
        issues.append(Issue("--workers", "not_deterministic", detail))
    if server is not None:
        detail = "is given with --deterministic-limit, but a server's jobs are limited in time. Maybe solve it here."
        issues.append(Issue("--server", "not_deterministic", detail))
    if issues:
        raise InputError(issues)


def _refuse_local_options(memory_limit: int | None, cache: bool) -> None:
    """Raise InputError where an option asks for what is the server's to decide."""
    given = {"--memory-limit": memory_limit is not None, "--no-cache": not cache}
    detail = "is for a solve on this machine; with --server it is the server's to decide. Maybe leave it out."
    issues = [Issue(name, "not_with_server", detail) for name, is_given in given.items() if is_given]
    if issues:
        raise InputError(issues)


def _solve_on(server: str, key: str | None, problem: Problem, method: str, limits: Limits) -> ServerResult:
    """A solve on a server; Ctrl-C cancels it there, and its best schedule so far is fetched."""
    from optpipe.client import Client

    with Client(server, key) as client:
        config = {"gap": limits.gap, "workers": limits.workers, "seed": limits.seed}
        job = client.submit(problem, method, limits.time_limit_s, **config)
        stderr().print(f"job {job.id}")
        try:
            client.follow(job.id, lambda progress: print_progress(progress.seconds, progress))
        except KeyboardInterrupt:
            limits.cancel.request()
            client.cancel(job.id)
        return client.result(job.id)


def _solve(
    problem: Problem,
    method: str,
    limits: Limits,
    memory_limit: int | None,
    output: str | None,
    starts: Sequence[Orders],
) -> ChildResult:
    """Solve in a process of its own; where that dies of itself, what it had found is written all the same."""
    from solver.process import SolverDiedError, solve_in_child

    memory_limit = memory_limit or free_memory_bytes()
    try:
        with ctrl_c_cancels(limits.cancel):
            return solve_in_child(problem, method, limits, memory_limit, print_event, starts=starts)
    except SolverDiedError as error:
        if error.best is not None:
            _write(error.best, output)
        raise


def free_memory_bytes() -> int | None:
    """What a search may take unless told otherwise; None where the system does not tell."""
    from solver.process import available_bytes

    available = available_bytes()
    return None if available is None else int(MEMORY_SHARE * available)


def _write(schedule: Schedule, output: str | None) -> None:
    from optpipe.schedule import schedule_text

    if output == "-":
        print(schedule_text(schedule), end="")
    elif output:
        write_atomically(Path(output), schedule_text(schedule))


def print_event(event: Progress | Heartbeat) -> None:
    """One line on stderr for each better value or bound."""
    from solver.solution import Progress

    if isinstance(event, Progress):
        print_progress(event.seconds, event.solution)


def print_progress(seconds: float, best: Solution | ServerProgress) -> None:
    """The line for a better value or bound, found here or on a server."""
    stderr().print(
        f"{seconds:8.2f} s  {us_text(best.value_us):>16}  bound {us_text(best.bound_us):>16}  "
        f"gap {share_text(best.gap):>8}  {best.method}",
    )


def _print_summary(schedule: Schedule, took: str, output: str | None) -> None:
    console = stdout()
    far = f"no schedule is shorter by more than {share_text(schedule.gap)}"
    proof = "optimal" if schedule.status == "optimal" else far
    lines = [
        f"{schedule.problem.name or 'problem'}: {schedule.objective} {us_text(schedule.value_us)}, {proof} "
        f"(bound {us_text(schedule.bound_us)})",
        f"method {schedule.method}, {took}; bubble {share_text(schedule.bubble)}; {_offloads_text(schedule)}",
        _memory_text(schedule),
    ]
    if output:
        lines.append(f"wrote {output}")
    for line in lines:
        console.print(line)


def _offloads_text(schedule: Schedule) -> str:
    moved = sum(len(device.offload) for device in schedule.devices)
    return f"{moved} activations offloaded" if moved else "nothing offloaded"


def _memory_text(schedule: Schedule) -> str:
    """The device whose any-timing peak is nearest to its budget."""
    limited = [
        (device.peak_bytes_any_timing, entry.memory_bytes, d)
        for d, (device, entry) in enumerate(zip(schedule.devices, schedule.problem.devices, strict=True))
        if entry.memory_bytes is not None
    ]
    if not limited:
        return f"peak {max(device.peak_bytes for device in schedule.devices):,} bytes; no budgets"
    peak, budget, d = max(limited, key=lambda entry: (entry[0] / entry[1] if entry[1] else 1.0, -entry[2]))
    return f"fullest device {d}: at most {peak:,} of {budget:,} bytes under any timing"


def methods(as_json: AsJson = False) -> int:
    """List the methods and what each can handle."""
    from solver.methods import METHODS

    if as_json:
        keys = ("name", "kind", "summary", "handles")
        print_json([{key: getattr(method, key) for key in keys} for method in METHODS.values()])
        return 0
    rows = table("method", "kind", "what it is", "what it handles")
    for column in rows.columns:
        column.justify, column.no_wrap = "left", False
    for method in METHODS.values():
        rows.add_row(method.name, method.kind, method.summary, method.handles)
    stdout().print(rows)
    return 0
