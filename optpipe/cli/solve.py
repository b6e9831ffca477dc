"""`optpipe solve`: a problem in, a verified schedule out. `optpipe methods`: the list of methods."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import (
    AsJson,
    compile_meanwhile,
    compile_once,
    ctrl_c_cancels,
    doing,
    doing_long,
    parse_size,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.errors import InputError, Issue, MethodError, NoSolutionError
from optpipe.files import STDOUT, check_writable, write_atomically
from optpipe.units import budget_text, bytes_text, change_text, percent_text, share_text, time_text

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

SEARCH = "Search"
"""Help panel of the options that limit a search."""

TIME_LIMIT_S = 30.0
"""Default time limit."""

SAME = 1e-3
"""Steps that differ by less than this share are equal: measured costs are no more exact."""

BUILT_IN = ("gpipe", "1f1b", "interleaved-1f1b", "1f1b-recompute")
"""Schedules that torch or Megatron-LM make by themselves."""

MOST_OPS = 20_000
"""Ops up to which a summary compares with them: that takes a fraction of a second."""

MEMORY_SHARE = 0.8
"""Default memory limit, as a share of the free memory."""


def command(
    problem: Annotated[Path, typer.Argument(help="A problem file (optpipe.problem/1).", metavar="PROBLEM.json")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="Output file; - for stdout.", metavar="SCHEDULE.json"),
    ] = None,
    method: Annotated[
        str, typer.Option(help="One of `optpipe methods`, or a schedule of yours: FILE.py:FUNCTION.", metavar="NAME")
    ] = "auto",
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
            help="Limit the work instead of the time: every run gives the same schedule, byte for byte. One unit "
            "takes one core about one to a few seconds.",
        ),
    ] = None,
    gap: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Stop once (value - bound) / value is at most this.", rich_help_panel=SEARCH
        ),
    ] = 0.0,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Threads; default: all cores, but one on a server and with --deterministic-limit.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the search.", rich_help_panel=SEARCH)] = 0,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory limit of the search, such as 8GiB; default: 80 % of the free memory.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Reuse and store results of earlier solves.")
    ] = True,
    server: Annotated[
        str | None, typer.Option(help="Solve on this server, such as http://host:8000.", metavar="URL")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPTPIPE_KEY", help="Bearer key for the server.", show_envvar=True)
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Find a schedule: the order of every op on every device, and what is offloaded when, within every budget.

    Progress goes to stderr, a summary to stdout. Ctrl-C stops the search and keeps the best schedule so far.

    With --deterministic-limit the same problem, seed and limit give the same file in every run, even on a busy
    machine: one thread searches, work is counted instead of time, and the cache is neither read nor written. The
    schedule's solve_seconds is then the work limit. Ctrl-C and the memory limit still end the search early.
    """
    from optpipe.problem import Problem
    from solver.limits import Limits, available_cores

    if output is not None and output != STDOUT:
        check_writable(Path(output), problem)
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
        detail = "is for a solve on this machine; with --server the server decides it. Maybe leave it out."
        local = {"--memory-limit": memory_limit is not None, "--no-cache": not cache, "--method": ":" in method}
        if issues := [Issue(name, "not_with_server", detail) for name, is_given in local.items() if is_given]:
            raise InputError(issues)
        limits = Limits(time_limit_s, gap, workers or 1, seed)
        with doing(f"{server} solves {what}"):
            result = _solve_on(server, key, loaded, method, limits)
    else:
        if deterministic_limit is None:
            compile_meanwhile(loaded)
        else:
            compile_once()  # the order of the searches must not depend on when their kernels are compiled
        limits = Limits(time_limit_s, gap, workers or available_cores(), seed, deterministic_limit=deterministic_limit)
        if ":" in method:
            result = _run_custom(loaded, method, limits)
        else:
            result = _solve_here(loaded, method, limits, memory_limit, output, cache, what)
    try:
        schedule = result.schedule_or_error()
    except NoSolutionError:
        if limits.cancel.requested:
            raise KeyboardInterrupt from None  # interrupted before anything was found
        raise
    interrupted = limits.cancel.requested
    _write(schedule, output)
    if output == STDOUT:
        pass  # stdout holds the schedule and nothing else
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
    use_cache: bool,
    what: str,
) -> ChildResult:
    """Solve in a child process, or return a cached result. If the child dies, its best schedule is still written."""
    from solver.process import SolverDiedError, solve_cached, solve_in_child

    def solve(starts: Sequence[Orders]) -> ChildResult:
        memory_bytes = memory_limit or free_memory_bytes()
        try:
            with doing(f"solving {what}"), ctrl_c_cancels(limits.cancel):
                return solve_in_child(problem, method, limits, memory_bytes, print_event, starts=starts)
        except SolverDiedError as error:
            if error.best is not None:
                _write(error.best, output)
            raise

    result = solve_cached(problem, method, limits, solve) if use_cache else solve([])
    if result.from_cache:
        stderr().print("an equal problem was solved before (--no-cache solves it again)")
    return result


def _run_custom(problem: Problem, method: str, limits: Limits) -> ChildResult:
    """The schedule of a function in a file of the user's, which runs in this process; nothing of it is cached."""
    from solver.methods import register_file
    from solver.process import ChildResult
    from solver.solve import solve

    name = register_file(method, "--method").name
    with doing_long(f"running {name}"):
        schedule = solve(problem, name, limits)
    return ChildResult(schedule, schedule.status, None)


def _solve_on(server: str, key: str | None, problem: Problem, method: str, limits: Limits) -> ServerResult:
    """Solve on a server; Ctrl-C cancels the job there and fetches its best schedule so far."""
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


def _refuse_with_deterministic_limit(
    time_limit: float | None, method: str, workers: int | None, server: str | None
) -> None:
    """Raise InputError for each option with which two runs could end differently."""
    issues = []
    if time_limit is not None:
        detail = "ends a search by the clock, which --deterministic-limit does not read. Maybe leave one of them out."
        issues.append(Issue("--time-limit", "not_deterministic", detail))
    if method == "milp":
        detail = "is milp, whose solver HiGHS has a time limit but no work limit. Maybe use cp-sat."
        issues.append(Issue("--method", "not_deterministic", detail))
    if workers not in (None, 1):
        detail = (
            f"is {workers}, but only a search with 1 thread gives the same schedule in every run. Maybe leave it out."
        )
        issues.append(Issue("--workers", "not_deterministic", detail))
    if server is not None:
        detail = (
            "is given with --deterministic-limit, but a server's jobs have a time limit. Maybe solve on this machine."
        )
        issues.append(Issue("--server", "not_deterministic", detail))
    if issues:
        raise InputError(issues)


def free_memory_bytes() -> int | None:
    """Default memory limit of a search; None if the system does not report its free memory."""
    from solver.process import available_bytes

    available = available_bytes()
    return None if available is None else int(MEMORY_SHARE * available)


def _write(schedule: Schedule, output: str | None) -> None:
    from optpipe.schedule import schedule_text

    if output == STDOUT:
        print(schedule_text(schedule), end="")
    elif output:
        write_atomically(Path(output), schedule_text(schedule))


def print_event(event: Progress | Heartbeat) -> None:
    """Print one line on stderr for each better value or bound."""
    from solver.solution import Progress

    if isinstance(event, Progress):
        print_progress(event.seconds, event.solution)


def print_progress(seconds: float, best: Solution | ServerProgress) -> None:
    """Print one line on stderr for a better value or bound, found here or on a server."""
    stderr().print(
        f"{seconds:8.2f} s  {time_text(best.value_us):>10}  bound {time_text(best.bound_us):>10}  "
        f"gap {share_text(best.gap):>8}  {best.method}",
    )


def _print_summary(schedule: Schedule, took: str, output: str | None) -> None:
    gap_text = f"no schedule is shorter by more than {share_text(schedule.gap)}"
    proof = "optimal" if schedule.status == "optimal" else gap_text
    offloads = sum(len(device.offload) for device in schedule.devices)
    offloaded = f"{offloads} activations offloaded" if offloads else "nothing offloaded"
    bubble = f"bubble {share_text(schedule.bubble)}"
    if schedule.problem.has_modes:
        recomputed = sum(device.recomputed for device in schedule.devices)
        offloaded += f", {recomputed} recomputed"
        if recomputed:
            bubble += f" ({share_text(schedule.bubble_with_recomputation)} with recomputation)"
    lines = [
        f"{schedule.problem.name or 'problem'}: {schedule.objective.replace('_', ' ')} "
        f"{time_text(schedule.value_us)}, {proof} (bound {time_text(schedule.bound_us)})",
        f"method {schedule.method}, {took}; {bubble}; {offloaded}",
    ]
    limited = [
        (device.peak_bytes_any_timing, entry.memory_bytes, d)
        for d, (device, entry) in enumerate(zip(schedule.devices, schedule.problem.devices, strict=True))
        if entry.memory_bytes is not None
    ]
    if limited:
        peak, budget, d = max(limited, key=lambda entry: (entry[0] / entry[1] if entry[1] else 1.0, -entry[2]))
        lines.append(f"fullest device {d}: at most {budget_text(peak, budget)}, under any timing")
    else:
        lines.append(f"peak {bytes_text(max(device.peak_bytes for device in schedule.devices))}; no budgets")
    lines += _worth(schedule)
    if output:
        lines.append(f"wrote {output}")
    for line in lines:
        stdout().print(line)


def _worth(schedule: Schedule) -> list[str]:
    """A sentence on whether this order pays, against those that every trainer has built in."""
    from optpipe.simulate import simulate
    from solver.frozen import orders_without_backwards, with_backwards
    from solver.methods import METHODS, published_orders
    from solver.scale import count_ops

    problem = schedule.problem
    if schedule.method in BUILT_IN or count_ops(problem) > MOST_OPS:
        return []
    rivals = []
    for name in BUILT_IN:
        with suppress(MethodError):
            orders = orders_without_backwards(problem, published_orders(METHODS[name], with_backwards(problem)))
            rivals.append((simulate(problem, orders).value_us, name))
    if not rivals:
        return ["no schedule that trainers have built in fits this problem"]
    value_us, name = min(rivals)
    if abs(value_us - schedule.value_us) < SAME * schedule.value_us:
        return [f"{name} is within {percent_text(SAME)} of this schedule: change nothing"]
    return [f"{name}, built into trainers, takes {time_text(value_us)}: {change_text(value_us, schedule.value_us)}"]


def methods(as_json: AsJson = False) -> int:
    """List the methods: what each is, what it can handle, and the paper that it is from."""
    from solver.methods import METHODS

    if as_json:
        keys = ("name", "kind", "summary", "handles")
        print_json(
            [
                {key: getattr(method, key) for key in keys} | {"paper": method.paper and asdict(method.paper)}
                for method in METHODS.values()
            ]
        )
        return 0
    rows = table("method", "kind", "what it is", "what it handles", "source")
    for column in rows.columns:
        column.justify, column.no_wrap = "left", False
    for method in METHODS.values():
        rows.add_row(method.name, method.kind, method.summary, method.handles, str(method.paper or ""))
    stdout().print(rows)
    return 0
