"""Analyzing schedules and comparing published ones."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from httpx import Client
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from api.analysis import MOST_VIOLATIONS, Analysis, Comparison, Recognized
from instances import HALF, instance, uniform
from optpipe.cluster.model import named_models
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.trace.compare import Span, planned_spans
from optpipe.trace.compare import compare as compare_trace
from optpipe.verify import verify
from solver.methods import METHODS
from solver.solve import solve
from tests.api.harness import PROBLEM
from tests.optpipe.trace.traces import trace_of
from tests.problems import KNOWN_OPTIMA, problems
from tests.recomputing import every_mode
from tests.sample import examples


def analysis(client: Client, schedule: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/analyze", json=schedule)
    assert answer.status_code == 200, answer.text
    Analysis.model_validate(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def test_a_valid_schedule(client: Client) -> None:
    schedule = solve(uniform(2, 4, budget=2, offload=HALF), "ada-offload")
    found = analysis(client, schedule.to_data())
    verdict = verify(schedule)
    assert found["valid"] is True
    assert found["violations"] == []
    assert (found["value_us"], found["makespan_us"]) == (schedule.value_us, verdict.makespan_us)
    assert found["bubble"] == schedule.bubble
    assert found["host_peak_bytes"] == verdict.host_peak_bytes
    assert found["critical_path"][0] == "F0.0"
    assert found["ops"]["F1.0"] == {"needs": ["F0.0"], "starts_after": "F0.0", "delay_us": 1.0}
    assert found["ops"]["F0.0"]["starts_after"] is None
    for d, (device, plan) in enumerate(zip(found["devices"], schedule.devices, strict=True)):
        assert tuple(device[f"idle_{when}_us"] for when in ("before", "within", "after")) == schedule.idle_us(d)
        assert device["peak_bytes"] == plan.peak_bytes == max(device["memory"]["bytes"])
        assert device["peak_bytes_any_timing"] == plan.peak_bytes_any_timing
        assert device["memory_bytes"] == 2
        assert device["memory"]["times_us"] == sorted(device["memory"]["times_us"])


def test_a_schedule_that_recomputes(client: Client) -> None:
    found = analysis(client, every_mode().to_data())
    assert found["valid"] is True
    for device, plan in zip(found["devices"], every_mode().devices, strict=True):
        assert device["peak_bytes"] == plan.peak_bytes == max(device["memory"]["bytes"])
        assert device["busy_us"] == plan.busy_us
    data = every_mode().to_data()
    del data["devices"][0]["compute"][0]["mode"]
    assert ("mode", "C0.0") in {(broken["rule"], broken["where"]) for broken in analysis(client, data)["violations"]}


def test_broken_rules_are_told_with_op_and_time(client: Client) -> None:
    schedule = solve(PROBLEM, "zb-h1").to_data()
    ops = schedule["devices"][1]["compute"]
    ops[0]["start_us"], ops[0]["end_us"] = 0.0, 10.0
    found = analysis(client, schedule)
    assert found["valid"] is False
    assert {"rule": "dependency", "where": "F1.0", "time_us": 0.0} in [
        {name: broken[name] for name in ("rule", "where", "time_us")} for broken in found["violations"]
    ]


def test_a_schedule_that_breaks_everything_is_still_analyzed(client: Client) -> None:
    schedule = solve(uniform(2, 600), "gpipe").to_data()
    for device in schedule["devices"]:
        for op in device["compute"]:
            op["start_us"], op["end_us"] = 1e30, -1e30
    found = analysis(client, schedule)
    assert found["valid"] is False
    assert len(found["violations"]) == MOST_VIOLATIONS < found["violation_count"]


def test_an_empty_schedule(client: Client) -> None:
    schedule = solve(PROBLEM, "zb-h1").to_data()
    for device in schedule["devices"]:
        device["compute"] = []
    found = analysis(client, schedule)
    assert (found["valid"], found["ops"], found["critical_path"]) == (False, {}, [])


def test_the_published_schedules_side_by_side(client: Client) -> None:
    answer = client.post("/v1/compare", json={"problem": PROBLEM.to_data()})
    assert answer.status_code == 200
    rows = Comparison.model_validate(answer.json()).methods
    assert {row.method for row in rows} == {method.name for method in METHODS.values() if method.kind == "published"}
    values = [row.value_us for row in rows if row.value_us is not None]
    assert values == sorted(values)
    assert values[0] == 131
    assert all((row.value_us is None) == (row.why_not is not None) for row in rows)
    assert all(row.schedule is None for row in rows)


def test_compared_schedules_whole(client: Client) -> None:
    answer = client.post("/v1/compare", params={"schedules": True}, json={"problem": PROBLEM.to_data()})
    rows = [row for row in answer.json()["methods"] if row["why_not"] is None]
    assert len(rows) > 4
    for row in rows:
        schedule = Schedule.from_data(row["schedule"])
        assert verify(schedule).ok
        assert schedule.value_us == row["value_us"]


def test_a_measured_problem(client: Client) -> None:
    answer = client.post("/v1/compare", json={"problem": instance("zb-1.5b-p8-m24-mem1").to_data()})
    found = {row["method"]: row["value_us"] for row in answer.json()["methods"] if row["why_not"] is None}
    assert found["zb-auto"] <= found["1f1b"]


@hypothesis_settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_any_problem_can_be_compared(client: Client, problem: Problem) -> None:
    answer = client.post("/v1/compare", json={"problem": problem.to_data()})
    assert answer.status_code == 200, answer.text


def test_the_server_answers_while_it_compares(client: Client, service_url: str) -> None:
    """Heavy work leaves the event loop alone: quick calls go on beside it."""
    problem = instance("po-18.1b-16k-d16-v3-m128-mem0.25").to_data()
    with httpx.Client(base_url=service_url, headers=client.headers, timeout=60) as other:
        answers: list[int] = []
        heavy = threading.Thread(
            target=lambda: answers.append(other.post("/v1/compare", json={"problem": problem}).status_code)
        )
        heavy.start()
        beside = 0
        while heavy.is_alive():
            assert client.get("/healthz").status_code == 200
            beside += 1
        heavy.join()
    assert answers == [200]
    assert beside > 20


@pytest.mark.parametrize("name", KNOWN_OPTIMA)
def test_optima_are_below_what_is_published(client: Client, name: str) -> None:
    problem, optimum = KNOWN_OPTIMA[name]
    rows = client.post("/v1/compare", json={"problem": problem.to_data()}).json()["methods"]
    values = [row["value_us"] for row in rows if row["why_not"] is None]
    assert values
    assert min(values) >= optimum


TIMES = ("forward_us", "backward_input_us", "backward_weight_us")
TORCH_ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
TOO_FEW = "0F0,0B0\n1F0\n"


def recognized(client: Client, name: str, text: str, **more: Any) -> Any:
    answer = client.post("/v1/recognize", json={"name": name, "text": text, **more})
    if answer.is_success:
        Recognized.model_validate(answer.json())
        return answer.json()
    (fault,) = answer.json()["errors"]
    assert (answer.status_code, fault["pointer"]) == (422, "/text")
    return fault["detail"]


def test_files_are_recognized(client: Client) -> None:
    schedule = solve(PROBLEM, "zb-h1")
    problem = PROBLEM.to_json()
    for text, kind in ((problem, "problem"), (f'{{"problem": {problem}}}', "problem")):
        assert recognized(client, "x", text) == {"kind": kind, "notes": [], "schedules": []}
    assert recognized(client, "config.json", json.dumps(dict(named_models()["llama-3.1-8b"])))["kind"] == "config"
    found = recognized(client, "s.json", schedule.to_json())
    assert (found["kind"], found["notes"]) == ("schedule", ["The verifier finds nothing wrong."])
    assert found["schedules"] == [{"name": "s.json", "note": "zb-h1", "schedule": schedule.to_data()}]


def test_a_torch_csv_takes_the_costs_of_a_problem(client: Client) -> None:
    found = recognized(client, "ranks.csv", TORCH_ROWS)
    assert "taken are 1.000 ms for each F, B and W" in found["notes"][1]
    costs = uniform(2, 2, budget=8)
    found = recognized(client, "ranks.csv", TORCH_ROWS, problem=costs.to_data())
    assert found["notes"] == ["The verifier finds nothing wrong."]
    schedule = found["schedules"][0]["schedule"]
    assert schedule["problem"]["stages"] == costs.to_data()["stages"]
    assert schedule["bound_us"] == solve(costs, "1f1b").bound_us
    assert schedule["gap"] == pytest.approx(1 - schedule["bound_us"] / schedule["value_us"])
    free = [{**stage, **dict.fromkeys(TIMES, 0)} for stage in costs.to_data()["stages"]]
    found = recognized(client, "ranks.csv", TORCH_ROWS, problem={**costs.to_data(), "transfer_us": 0, "stages": free})
    assert found["schedules"][0]["schedule"]["value_us"] == 0


def test_a_trace_holds_the_plan_and_the_step(client: Client) -> None:
    schedule = solve(PROBLEM, "zb-h1")
    trace = trace_of(
        schedule, {op: Span(2 * span.start_us, 2 * span.end_us) for op, span in planned_spans(schedule).items()}
    )
    found = recognized(client, "trace.json", trace.to_json())
    compared = compare_trace(trace)
    planned, measured = (entry["schedule"] for entry in found["schedules"])
    assert planned == trace.schedule.to_data()
    assert (measured["value_us"], measured["gap"]) == (compared.step_us, None)
    for device in measured["devices"]:
        for op in device["compute"]:
            span = compared.spans[Op(op["op"], op["stage"], op["microbatch"])]
            assert (op["start_us"], op["end_us"]) == span
    assert found["notes"] == ["The step took 268.0 µs, 100.0 % longer than planned."]


def test_other_files_are_refused_by_name(client: Client) -> None:
    assert recognized(client, "l.json", '{"format": "optpipe.layers/1"}').startswith("l.json is a layer profile; ")
    assert recognized(client, "t.txt", "hello").startswith("t.txt is none of the files that are known here")
    assert "Maybe rows are missing" in recognized(client, "r.csv", TOO_FEW)
    assert "twice" in recognized(client, "d.json", '{"format": 1, "format": 2}')
    data = solve(PROBLEM, "zb-h1").to_data()
    del data["devices"][0]["compute"][0]["stage"]
    assert recognized(client, "s.json", json.dumps(data)).startswith("s.json: devices[0].compute[0].stage ")
