"""Every command does its job, in text and in JSON, with the exit code of the contract."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instances import INSTANCES, uniform
from optpipe.cli.compare import Row, Table
from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.units import share_text
from optpipe.verify import verify
from solver.build import build_schedule
from solver.limits import Limits
from solver.methods import METHODS, register
from solver.process import ChildResult, SolverDiedError
from solver.solve import solve
from tests.optpipe.cli.conftest import Cli
from tests.recomputing import COPY, FULL, one_f_one_b, recomputing
from tests.sample import some

PYTHON = sys.executable


def test_solve_writes_a_verified_schedule_and_a_summary(cli: Cli, problem_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    run = cli("solve", problem_file, "-o", out)
    assert run.code == 0
    schedule = Schedule.load(out)
    assert verify(schedule).ok
    assert schedule.status == "optimal"
    assert schedule.problem == Problem.load(problem_file)
    assert "optimal" in run.out
    assert f"wrote {out}" in run.out
    assert "bound" in run.err


def test_solve_tells_what_is_idle_from_what_is_recomputed(cli: Cli, tmp_path: Path) -> None:
    problem, out = tmp_path / "problem.json", tmp_path / "schedule.json"
    problem.write_text(recomputing(2, 4, (FULL,)).to_json())
    run = cli("solve", problem, "--method", "1f1b-recompute", "-o", out)
    schedule = Schedule.load(out)
    not_own = schedule.bubble_with_recomputation
    assert not_own == 1 - max(schedule.problem.work_us) / schedule.value_us > schedule.bubble
    bubble = f"bubble {share_text(schedule.bubble)} ({share_text(not_own)} with recomputation)"
    assert f"{bubble}; nothing offloaded, 8 recomputed" in run.out


def test_solve_to_stdout_is_the_schedule_alone(cli: Cli, problem_file: Path) -> None:
    run = cli("solve", problem_file, "-o", "-")
    assert Schedule.from_json(run.out).status == "optimal"


def test_a_name_that_looks_like_markup(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(uniform(2, 3, name="[/gpu] :b:").to_json())
    run = cli("solve", path, "--method", "zb-auto", "--no-cache")
    assert run.code == 0
    assert run.out.startswith("[/gpu] :b:: makespan")


def test_solve_json_summary(cli: Cli, problem_file: Path) -> None:
    document = cli("solve", problem_file, "--json", "--method", "zb-auto").document
    assert document["method"] == "zb-auto"
    assert document["peak_bytes"] == [4, 3]
    assert document["interrupted"] is False


def test_solve_says_by_how_much_a_schedule_could_be_shorter(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(uniform(4, 8).to_json())
    asked = ("solve", path, "--method", "1f1b")
    told, found = cli(*asked).out, cli(*asked, "--json").document
    assert found["bound_us"] < found["value_us"]
    share = 100 * (found["value_us"] - found["bound_us"]) / found["value_us"]
    assert f"no schedule is shorter by more than {share:.2f} %" in told


@pytest.mark.parametrize(
    ("method", "devices", "budget", "sentence"),
    [
        ("zb-h1", 3, None, "1f1b, built into trainers, takes 150.0 µs: +36.4 %"),
        ("zb-h1", 1, None, "1f1b is within 0.10 % of this schedule: change nothing"),
        ("search", 3, 2, "no schedule that trainers have built in fits this problem"),
        ("1f1b", 3, None, ""),
    ],
)
def test_solve_says_if_the_order_pays(
    cli: Cli, tmp_path: Path, method: str, devices: int, budget: int | None, sentence: str
) -> None:
    path = tmp_path / "problem.json"
    path.write_text(uniform(devices, 3, budget=budget, transfer_us=0).to_json())
    out = cli("solve", path, "--method", method, "--time-limit", "1", "--no-cache").out
    assert sentence in out
    assert ("built in" in out or "change nothing" in out) == bool(sentence), out


def test_solve_says_if_the_order_pays_beside_frozen_stages(cli: Cli, tmp_path: Path) -> None:
    """1F1B of three stages takes 150 us; without the backward of the first, the last op of 20 us is not there."""
    path, whole = tmp_path / "problem.json", uniform(3, 3, transfer_us=0)
    path.write_text(whole.replaced(stages=[whole.stages[0].replaced(backward="none"), *whole.stages[1:]]).to_json())
    run = cli("solve", path, "--method", "zb-h1", "--no-cache")
    assert run.code == 0
    assert "1f1b, built into trainers, takes 130.0 µs: +18.2 %" in run.out


def test_solve_stops_at_the_memory_it_may_take(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB are less than the solvers' own libraries: nothing is searched, but one microbatch after another fits."""
    monkeypatch.setattr(sys, "executable", PYTHON)  # the memory of a forked process is not its client's
    path, out = tmp_path / "problem.json", tmp_path / "s.json"
    path.write_text(uniform(4, 8, budget=8).to_json())
    run = cli("solve", path, "-o", out, "--memory-limit", "40MB", "--json")
    assert run.code == 0
    assert (run.document["limit"], run.document["method"]) == ("memory", "floor")
    assert verify(Schedule.load(out)).ok


def test_solve_knows_what_was_solved_before(cli: Cli, problem_file: Path, tmp_path: Path) -> None:
    first, again, anew = (tmp_path / name for name in ("first.json", "again.json", "anew.json"))
    cli("solve", problem_file, "-o", first)
    assert "solved before" in cli("solve", problem_file, "-o", again).err
    assert again.read_bytes() == first.read_bytes()
    assert "solved before" not in cli("solve", problem_file, "-o", anew, "--no-cache").err
    assert Schedule.load(anew).value_us == Schedule.load(first).value_us


@pytest.mark.parametrize(
    ("instance", "options"),
    some(
        [
            ("d-p4-m8-o1-mo1-b1o2-linear-make", ("auto", "--seed", "3")),
            ("d-p4-m8-o1-mo1-b1o2-linear-make", ("cp-sat",)),
            ("d-p4-m8-o1-mo1-b1o2-linear-make", ("search", "--seed", "5")),
            ("d-p4-m8-o1-mo1-b1o2-linear-make", ("ada-offload",)),
            ("d-p8-m16-o1-mo1-b1o4-linear-make", ("pattern",)),
        ]
    ),
)
def test_a_deterministic_limit_gives_the_same_bytes(
    cli: Cli, tmp_path: Path, instance: str, options: tuple[str, ...]
) -> None:
    """Also after a solve by the clock, whose schedule is in the cache."""
    path = INSTANCES / f"{instance}.json"
    schedules, told = [], []
    for run in range(2):
        out = tmp_path / "schedule.json"
        found = cli("solve", path, "-o", out, "--deterministic-limit", "0.02", "--json", "--method", *options)
        assert found.code == 0
        schedules.append(out.read_bytes())
        told.append(found.out)
        if run == 0:
            assert cli("solve", path, "--time-limit", "0.2", "--method", *options).code == 0
    assert schedules[0] == schedules[1]
    assert told[0] == told[1]
    schedule = Schedule.load(out)
    assert verify(schedule).ok
    assert schedule.solve_seconds == 0.02


def test_a_deterministic_limit_ends_the_search_and_says_so(cli: Cli) -> None:
    options = ("--deterministic-limit", "0.02", "--method", "search")
    problem = INSTANCES / "a-p8-m16-c0.1-b1o2-linear-make.json"
    assert cli("solve", problem, *options, "--json").document["limit"] == "work"
    assert "at most 0.02 units of work" in cli("solve", problem, *options).out


def test_a_deterministic_limit_stands_alone(cli: Cli, problem_file: Path) -> None:
    options = ("--time-limit", "30", "--workers", "2", "--method", "milp", "--server", "http://127.0.0.1:1")
    run = cli("solve", problem_file, "--deterministic-limit", "1", *options)
    assert run.code == 2
    for name in ("--time-limit", "--workers", "--method", "--server"):
        assert f"error: {name} " in run.err or f"\n{name} " in run.err
    assert "Maybe use cp-sat" in run.err


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--time-limit", "[200, 200"),
        ("--deterministic-limit", "0.01 units of work. Maybe allow more (--deterministic-limit)"),
    ],
)
def test_nothing_found_within_the_limit(cli: Cli, tmp_path: Path, option: str, reason: str) -> None:
    """A V placement at a budget of its floor minus a little: feasible or not, a hundredth of a second finds nothing."""
    path = tmp_path / "hard.json"
    path.write_text(uniform(8, 64, v_shape=True, activation_bytes=100, backward_weight_bytes=99, budget=199).to_json())
    run = cli("solve", path, option, "0.01", "--method", "search")
    assert run.code == 4
    assert reason in run.err


@pytest.mark.parametrize(("option", "first"), [("--time-limit", "meanwhile"), ("--deterministic-limit", "once")])
def test_only_counted_work_waits_for_kernels(
    cli: Cli, problem_file: Path, monkeypatch: pytest.MonkeyPatch, option: str, first: str
) -> None:
    """A clock does not: published schedules need none. What work finds must not depend on when kernels are ready."""
    done: list[str] = []

    def solved(problem: Problem, method: str, limits: Limits, *_: object, **__: object) -> ChildResult:
        done.append("solve")
        return ChildResult(solve(problem, "1f1b"), "feasible", "time")

    monkeypatch.setattr("optpipe.cli.solve.compile_once", lambda: done.append("once"))
    monkeypatch.setattr("optpipe.cli.solve.compile_meanwhile", lambda _: done.append("meanwhile"))
    monkeypatch.setattr("solver.process.solve_in_child", solved)
    assert cli("solve", problem_file, "--no-cache", option, "1").code == 0
    assert done == [first, "solve"]


def test_methods(cli: Cli) -> None:
    text = cli("methods").out
    assert all(name in text for name in METHODS)
    rows = cli("methods", "--json").document
    assert [row["name"] for row in rows] == list(METHODS)
    assert all((row["paper"] is not None) == (row["kind"] == "published") for row in rows)
    assert "Qi et al. 2024, arXiv 2401.10241" in text


def test_verify_says_valid(cli: Cli, schedule_file: Path) -> None:
    run = cli("verify", schedule_file)
    assert run.code == 0
    assert "valid: every rule" in run.out
    document = cli("verify", schedule_file, "--json").document
    assert document["ok"] is True
    schedule = Schedule.load(schedule_file)
    for d, device in enumerate(document["devices"]):
        assert sum(schedule.idle_us(d)) + device["busy_us"] == pytest.approx(document["makespan_us"])
    assert [schedule.idle_us(d)[0] for d in (0, 1)] == [0, schedule.devices[1].compute.starts[0]]


def test_verify_says_what_is_broken(cli: Cli, schedule_file: Path) -> None:
    data = json.loads(schedule_file.read_text())
    data["devices"][0]["compute"][1]["start_us"] -= 5
    data["devices"][0]["compute"][1]["end_us"] -= 5
    schedule_file.write_text(json.dumps(data))
    run = cli("verify", schedule_file)
    assert run.code == 1
    assert "[overlap]" in run.out
    run = cli("verify", schedule_file, "--json")
    assert run.code == 1
    assert "overlap" in {violation["rule"] for violation in run.document["violations"]}


def test_compare_shows_values_and_reasons(cli: Cli, problem_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "c.svg"
    run = cli("compare", problem_file, "--methods", "gpipe,1f1b,cp-sat", "--plot", picture)
    assert run.code == 0
    assert "gpipe needs 6 B on device 0, but its budget is 4 B: 2 B too few" in " ".join(run.out.split())
    assert picture.stat().st_size > 1000
    rows = {row["method"]: row for row in cli("compare", problem_file, "--methods", "gpipe,cp-sat", "--json").document}
    assert rows["cp-sat"]["status"] == "optimal"
    assert "2 B too few" in rows["gpipe"]["why_not"]


def test_compare_shows_what_uniform_choices_of_modes_give(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the published schedules, which need no time limit: the values are the same on any machine."""
    published = {name: method for name, method in METHODS.items() if method.kind == "published"}
    monkeypatch.setattr("solver.methods.METHODS", published)
    problem = tmp_path / "modes.json"
    problem.write_text(recomputing(2, 3, [FULL], 15, offload=COPY).to_json())
    rows = {row["method"]: row for row in cli("compare", problem, "--json").document}
    uniform = ("all kept", "all recomputed", "all offloaded", "one choice a stage")
    assert [rows[name]["value_us"] for name in uniform] == [13, 13, 13, 12]
    assert "why_not" in rows["gpipe"]


def test_compare_of_files_and_a_method_of_ones_own_on_several_problems(
    cli: Cli, problem_file: Path, schedule_file: Path, tmp_path: Path
) -> None:
    """A schedule and a CSV stand in the table of their problem, and every row has the best bound of its table."""
    other, own, csv = (tmp_path / name for name in ("other.json", "own.py", "own.csv"))
    other.write_text(uniform(2, 3, name="other").to_json())
    own.write_text(LATE_W)
    csv.write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    files = (other, problem_file, schedule_file, csv)
    methods = ("--methods", f"1f1b,{own}:order,cp-sat")
    rows = cli("compare", *files, "--problem", other, *methods, "--json").document
    found = {(Path(row["file"]).name, Path(row["method"]).name): row for row in rows}
    assert [name for file, name in found if file == "other.json"] == ["own.csv", "1f1b", "own.py:order", "cp-sat"]
    assert next(name for file, name in found if file != "other.json") == schedule_file.name
    assert len({(row["file"], row["bound_us"]) for row in rows if "bound_us" in row}) == 2
    assert found["other.json", "own.csv"]["value_us"] == found["other.json", "1f1b"]["value_us"]
    text = cli("compare", *files, "--problem", other, *methods).out
    assert text.count("no schedule is shorter than") == 2
    assert text.count("change nothing") + text.count("cp-sat saves") == 2
    assert "--problem is needed for the costs" in cli("compare", *files, *methods).err
    assert "2 are given" in cli("compare", other, problem_file, *methods, "--plot", tmp_path / "c.svg").err


def test_a_bound_is_above_no_value_by_rounding() -> None:
    """Each row's bound is rounded with its own value; the greatest may exceed the least value in the last digit."""
    problem = uniform(2, 2)
    best = solve(problem, "cp-sat", Limits(5))
    other = best.model_copy(update={"value_us": 2 * best.value_us, "bound_us": best.value_us * (1 + 1e-15)})
    assert other.bound_us > best.value_us
    table = Table(Path("p.json"), problem, [Row(str(n), one, "", 0.0) for n, one in enumerate((best, other))])
    assert table.bound_us == best.value_us


def test_compare_says_whether_a_search_could_pay(cli: Cli) -> None:
    optimal = cli("compare", INSTANCES / "c-real8-m32-b2-linear-make.json", "--methods", "zb-h1,1f1b").out
    assert "zb-h1 is optimal: change nothing" in optimal
    open_gap = cli("compare", INSTANCES / "c-real8-m32-b2-linear-make.json", "--methods", "1f1b").out
    assert "no schedule can save more than 8.3 % of the step of 1f1b" in open_gap


LATE_W = """
def order(problem):
    print("a line that is no part of the answer")
    lists = [["F0.0", "F0.1", "B0.0", "W0.0", "F0.2", "B0.1", "W0.1", "B0.2", "W0.2"]]
    return [*lists, " ".join(f"F1.{i} B1.{i} W1.{i}" for i in range(3))]


def lacks_one(problem):
    return [ops for ops in order(problem)[:1]]


def repeats(problem):
    return [order(problem)[0], order(problem)[1] + " W1.2"]


def late(problem):
    return [["B0.0", *(op for op in order(problem)[0] if op != "B0.0")], order(problem)[1]]


def early(problem):
    return ["F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2", order(problem)[1]]


def raises(problem):
    return problem.nothing


def number(problem):
    return 3


def other_names(problem):
    return [["X0.0"]] * 2
"""


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("order", 0, ""),
        ("lacks_one", 1, "returned 1 devices, but the problem has 2. Maybe return a list"),
        ("repeats", 1, "W1.2 is there more than once"),
        ("late", 1, "the orders deadlock"),
        ("early", 1, "needs 6 B on device 0, but its budget is 4 B"),
        ("raises", 1, "raised AttributeError: 'Problem' object has no attribute 'nothing' (line 25 of own.py)"),
        ("number", 1, "returned 3. Maybe return a list"),
        ("other_names", 1, "an op has the kind 'X'; the kinds are F, B, W"),
        ("absent", 2, "own.py has no function 'absent'; the functions there are order, lacks_one"),
    ],
)
def test_solve_with_a_schedule_of_ones_own(
    cli: Cli, problem_file: Path, tmp_path: Path, function: str, code: int, message: str
) -> None:
    own, out = tmp_path / "own.py", tmp_path / "own.json"
    own.write_text(LATE_W)
    run = cli("solve", problem_file, "--method", f"{own}:{function}", "-o", out, "--json")
    assert run.code == code, run.err
    assert message in run.err
    assert out.exists() == (code == 0)
    if code == 0:
        assert verify(Schedule.load(out)).ok
        assert run.document["method"].endswith("own.py:order")


@pytest.mark.parametrize(
    ("text", "message"),
    [("def order(problem", "own.py raised SyntaxError"), (None, "there is no file"), ("1 / 0", "(line 1 of own.py)")],
)
def test_a_file_that_is_absent_or_fails_is_named(
    cli: Cli, problem_file: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    own = tmp_path / "own.py"
    if text is not None:
        own.write_text(text)
    run = cli("compare", problem_file, "--methods", f"{own}:order")
    assert (run.code, message in run.err) == (2, True), run.err


def test_register_refuses_what_is_no_method() -> None:
    for name in ("zb-v", "", "m" * 101):
        with pytest.raises(InputError, match="must be 1 to 100 characters and no built-in method"):
            register(name, lambda _: [])


def test_compare_without_a_schedule_shows_why_and_draws_nothing(cli: Cli, problem_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "c.svg"
    run = cli("compare", problem_file, "--methods", "gpipe,gpipe", "--plot", picture, "--json")
    assert run.code == 0
    assert ["2 B too few" in row["why_not"] for row in run.document] == [True]
    assert f"{picture} is not drawn" in run.err
    assert not picture.exists()


def test_compare_when_interrupted_shows_what_is_done(
    cli: Cli, problem_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search that runs keeps its best; the methods behind it are not begun."""

    def interrupted(problem: Problem, method: str, limits: Limits, memory_limit_bytes: int | None) -> ChildResult:
        os.kill(os.getpid(), signal.SIGINT)
        assert limits.cancel.requested
        return ChildResult(solve(problem, "1f1b"), "feasible", "interrupted")

    monkeypatch.setattr("solver.process.solve_in_child", interrupted)
    run = cli("compare", problem_file, "--methods", "1f1b,search,zb-h1", "--json")
    assert run.code == 130
    assert [(row["method"], "value_us" in row) for row in run.document] == [("1f1b", True), ("search", True)]


def test_compare_goes_on_where_a_search_dies(cli: Cli, problem_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> ChildResult:
        raise SolverDiedError("ended by SIGSEGV", None)

    monkeypatch.setattr("solver.process.solve_in_child", dies)
    run = cli("compare", problem_file, "--methods", "milp,1f1b", "--json")
    assert run.code == 0
    died, done = run.document
    assert "SIGSEGV" in died["why_not"]
    assert done["status"] in ("feasible", "optimal")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "html"])
def test_plot(cli: Cli, schedule_file: Path, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"picture.{suffix}"
    assert cli("plot", schedule_file, "-o", picture, "--width", "84mm").code == 0
    assert "Maybe write it as 3.3in" in cli("plot", schedule_file, "-o", picture, "--width", "1in").err
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!DOCTYPE html>"}[suffix]
    assert picture.read_bytes().startswith(begin)


def test_export_chrome_trace(cli: Cli, schedule_file: Path, tmp_path: Path) -> None:
    trace, old = tmp_path / "trace.json", tmp_path / "old.json"
    trace.write_text("old")
    old.hardlink_to(trace)
    assert cli("export", schedule_file, "--to", "chrome-trace", "-o", trace).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 3 * 3
    assert old.read_text() == "old", "the file is replaced in one step, not written into"


def test_export_to_stdout_has_the_content_alone(cli: Cli, schedule_file: Path, tmp_path: Path) -> None:
    run = cli("export", schedule_file, "--to", "torch-csv", "-o", tmp_path / "orders.csv")
    piped = cli("export", schedule_file, "--to", "torch-csv", "-o", "-")
    assert (run.code, piped.code, piped.out) == (0, 0, (tmp_path / "orders.csv").read_text())
    assert "--output is -, but stdout has the summary here" in cli("trace", schedule_file, "-o", "-").err
    assert (
        "--output is -, but stdout has the summary here"
        in cli("plan", "gpt2-xl", "--gpus", 1, "--global-batch", 1, "-o", "-").err
    )


def test_an_input_is_not_replaced(cli: Cli, problem_file: Path, schedule_file: Path) -> None:
    for command in (("solve", problem_file), ("export", schedule_file, "--to", "problem"), ("trace", schedule_file)):
        before = command[1].read_bytes()
        run = cli(*command, "-o", command[1])
        assert (run.code, "it is what is read, and would be lost" in run.err) == (2, True), run.err
        assert command[1].read_bytes() == before


@pytest.mark.parametrize("form", ["lp", "mps"])
def test_export_of_the_model_of_a_problem_and_of_a_schedule(
    cli: Cli, problem_file: Path, schedule_file: Path, tmp_path: Path, form: str
) -> None:
    of_problem, of_schedule = tmp_path / f"problem.{form}", tmp_path / f"schedule.{form}"
    run = cli("export", problem_file, "--to", form, "-o", of_problem, "--json")
    assert run.code == 0, run.err
    assert run.document["rows"] > run.document["columns"] > run.document["integer_columns"] > 0
    assert cli("export", schedule_file, "--to", form, "-o", of_schedule).code == 0
    assert of_problem.read_text() == of_schedule.read_text()
    assert "memory_F0_1" in of_problem.read_text()


def test_export_of_the_nearest_settings_of_other_trainers(cli: Cli, tmp_path: Path) -> None:
    """Half of 1F1B's memory, of which a microbatch keeps a tenth if it is recomputed."""
    flags, schedule = tmp_path / "flags.txt", tmp_path / "schedule.json"
    problem = recomputing(4, 8, budget=20)
    problem = Problem.from_data(problem.to_data() | {"name": "a model, cut 5,4,4,5"})
    backwards = one_f_one_b(problem, lambda _s, _i: "CBW")
    schedule.write_text(build_schedule(problem, backwards, 0.0, "by hand", 0.0).to_json())
    run = cli("export", schedule, "--to", "megatron", "-o", flags)
    assert run.code == 0
    assert flags.read_text().splitlines() == [
        "# step 44.00 µs, the plan's 44.00 µs: the same",
        "# the trainer runs an order of its own, not the plan's",
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-layout Et*4|(t*4|)*2t*4L",
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 4",
    ]
    assert run.out.index("the plan") < run.out.index("full") < run.out.index("kept")
    run = cli("export", schedule, "--to", "torchtitan", "-o", flags, "--json")
    assert run.code == 1
    assert "no setting keeps the budgets: with the nearest one a device lacks 20 B" in run.err
    assert "# DOES NOT FIT: a device lacks 20 B with these settings, the nearest ones" in flags.read_text()
    assert flags.read_text().splitlines()[-1] == "--activation_checkpoint.mode none"
    assert run.document["settings"][0]["short_bytes"] == 20
    assert run.document["plan"]["value_us"] == 44


def test_export_says_that_blocks_are_lost(cli: Cli, tmp_path: Path) -> None:
    flags, schedule = tmp_path / "flags.txt", tmp_path / "schedule.json"
    pairs = [{"forward_stage": s, "backward_stage": 3 - s, "us": 25} for s in range(4)]
    schedule.write_text(solve(uniform(2, 6, v_shape=True, transfer_us=0, overlaps=pairs), "dualpipe-v").to_json())
    assert cli("export", schedule, "--to", "torchtitan", "-o", flags).code == 0
    assert "blocks of a forward and a backward: the two run one after the other" in flags.read_text()


def test_export_of_settings_where_nothing_takes_time(cli: Cli, tmp_path: Path) -> None:
    data = uniform(2, 3, transfer_us=0).to_data()
    for stage in data["stages"]:
        stage |= {"forward_us": 0, "backward_input_us": 0, "backward_weight_us": 0}
    schedule = tmp_path / "schedule.json"
    schedule.write_text(solve(Problem.from_data(data), "1f1b").to_json())
    assert cli("export", schedule, "--to", "megatron", "-o", tmp_path / "flags.txt").code == 0


def test_export_refuses_models_that_would_be_too_large(cli: Cli, tmp_path: Path) -> None:
    large, out = tmp_path / "large.json", tmp_path / "large.lp"
    large.write_text(uniform(8, 64).to_json())
    run = cli("export", large, "--to", "lp", "-o", out)
    assert run.code == 2
    assert "are 1536 ops of F, B, W, O, R and C together, but a model is written for at most 1000" in run.err
    assert not out.exists()


def test_train_with_check(cli: Cli, schedule_file: Path) -> None:
    run = cli("train", "--schedule", schedule_file, "--model", "tiny", "--steps", "3", "--check", "--json")
    assert run.code == 0
    check = run.document["check"]
    assert check["max_gradient_error"] <= 1e-5
    assert [device["live_bytes"] for device in check["devices"]] == [[0, 0], [0, 0]]
    assert len(run.document["losses"]) == 3
    assert "loss" in run.err
    assert (
        "largest gradient error"
        in cli("train", "--schedule", schedule_file, "--model", "tiny", "--steps", "1", "--check").out
    )


def test_infeasible_is_proved_with_a_budget_that_does(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "tight.json"
    path.write_text(uniform(2, 2, v_shape=True, budget=3).to_json())
    run = cli("solve", path, "--json")
    assert run.code == 3
    assert run.document["error"]["budgets_bytes"] == [4, 4]
    assert "Maybe raise devices[].memory_bytes to [4, 4]" in run.err


def test_the_module_is_the_same_program(forked: Path) -> None:
    command = [forked / "python", "-m", "optpipe", "methods", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert [row["name"] for row in json.loads(run.stdout)] == list(METHODS)


def test_ctrl_c_keeps_the_best_schedule(forked: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    instance = INSTANCES / "d-p8-m16-o1-mo1-b1o4-vshape-make.json"
    options = ("-o", out, "--time-limit", "300", "--method", "cp-sat")
    command = [forked / "python", "-m", "optpipe", "solve", instance, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "bound" in process.stderr.readline()
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "Traceback" not in errors
    schedule = Schedule.load(out)
    assert verify(schedule).ok
    assert schedule.status == "feasible"
