"""Plans over HTTP: submit, follow, fetch; equal ones, limits, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from httpx import Client

from api.errors import HttpError
from api.process_pool_child import launch
from api.routes.schedules import INLINE_BYTES
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import named_models
from optpipe.export.launch import launch_files
from optpipe.schedule import Schedule
from optpipe.verify import verify
from solver.layout.strategies import FIELDS

JOB: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpus": 16,
    "machine": "h100",
    "sequence": 4096,
    "global_batch": 32,
    "fixed": {"pp": [2, 4], "tp": 4, "vocabulary": "last"},
    "config": {"time_limit_s": 6},
}


def test_a_plan_is_a_job(client: Client, tasks: list[str]) -> None:
    answer = client.post("/v1/plans", params={"wait": 50}, json=JOB)
    job = answer.json()
    path = answer.headers["location"]
    assert (answer.status_code, path) == (200, f"/v1/plans/{job['id']}")
    assert (job["kind"], job["status"], job["name"]) == ("plan", "succeeded", "llama-3.1-8b on 16 h100")
    plan = client.get(f"{path}/plan").json()
    assert (plan["format"], plan["complete"]) == ("optpipe.plan/1", True)
    seconds = [one["seconds"] for one in plan["strategies"] if one["end"] == "solved"]
    assert job["value_us"] == min(seconds) * 1e6
    assert job["bound_us"] == min(one["bound_s"] for one in plan["strategies"]) * 1e6
    schedule = Schedule.from_json(client.get(f"{path}/schedule").content)
    assert verify(schedule).ok
    assert schedule.value_us == plan["solved"][0]["pipeline_us"]
    assert client.get(f"{path}/schedule", params={"format": "svg"}).text.startswith("<?xml")
    assert client.get(f"{path}/request").json() == {name: JOB[name] for name in JOB if name != "config"}
    kinds = [line for line in client.get(f"{path}/events").text.splitlines() if line.startswith("event: ")]
    assert kinds[:3] == ["event: status", "event: status", "event: incumbent"]

    known = {"If-None-Match": client.get(f"{path}/plan").headers["etag"]}
    assert client.get(f"{path}/plan", headers=known).status_code == 304
    other = next(one for one in plan["strategies"] if one["end"] == "solved" and "solved" not in one)
    named = ",".join(f"{name}={other[name]}" for name in ("tp", "pp", "vpp", "dp", "microbatch_size", "recompute"))
    answer = client.get(f"{path}/schedule", params={"strategy": named})
    drawn = Schedule.from_json(answer.content)
    assert verify(drawn).ok
    tasks.clear()
    known = {"If-None-Match": answer.headers["etag"]}
    assert client.get(f"{path}/schedule", params={"strategy": named}, headers=known).status_code == 304
    assert tasks == []
    assert len(drawn.problem.devices) == other["pp"]
    assert len(drawn.problem.stages) == other["pp"] * other["vpp"]
    kept = client.get(f"{path}/schedule", params={"strategy": named, "format": "png", "drop_offload": True})
    assert (kept.status_code, kept.json()["errors"][0]["code"]) == (422, "nothing_to_drop")
    for text, code in (("tp=3", "unknown_strategy"), ("tp=x", "bad_parameter"), ("tp", "bad_parameter")):
        [fault] = client.get(f"{path}/schedule", params={"strategy": text}).json()["errors"]
        assert (fault["pointer"], fault["code"]) == ("", code)

    check_launch_files(client, path, plan)

    again = client.post("/v1/plans", json=JOB | {"model": named_models()["llama-3.1-8b"], "config": {"name": "mine"}})
    assert again.status_code == 202  # more time is asked for
    equal = client.post("/v1/plans", json=JOB | {"config": {"time_limit_s": 2, "name": "mine"}})
    assert (equal.status_code, equal.json()["attempt"], equal.json()["name"]) == (200, 0, "mine")
    assert client.get(f"{equal.headers['location']}/plan").json() == plan
    assert client.post(f"{again.headers['location']}/cancel").status_code == 200

    assert {one["kind"] for one in client.get("/v1/plans").json()["jobs"]} == {"plan"}
    assert client.get("/v1/schedules").json()["jobs"] == []
    assert client.delete(path).status_code == 204
    assert client.get(f"{path}/plan").status_code == 404


def check_launch_files(client: Client, path: str, plan: dict[str, Any]) -> None:
    """All files at once and each by name are those of the command line; what a trainer cannot run is refused."""
    query = {"to": "torchtitan"}
    answer = client.get(f"{path}/export", params=query)
    made = launch_files(plan, "torchtitan")
    schedule = {"schedule.json": None} if made.runs_schedule else {}
    assert {one["name"]: one["text"] for one in answer.json()["files"]} == {**made.files, **schedule}
    assert (answer.json()["lost"], answer.json()["seconds"]) == ([*made.lost], made.seconds)
    known = {"If-None-Match": answer.headers["etag"]}
    assert client.get(f"{path}/export", params=query, headers=known).status_code == 304
    texts = {
        name: client.get(f"{path}/export", params=query | {"file": name}).text for name in (*made.files, *schedule)
    }
    taken = next(
        (one for one in plan["strategies"] if "solved" in one and one["seconds"] == plan["best"]["seconds"]), {}
    )
    for name in schedule:
        strategy = ",".join(f"{axis}={taken[axis]}" for axis in FIELDS)
        assert texts.pop(name) == client.get(f"{path}/schedule", params={"strategy": strategy}).text
    assert texts == made.files
    for wrong, part in (
        ({"to": "slurm"}, "'megatron', 'bridge', 'torchtitan' or 'automodel'"),
        ({"to": "megatron", "file": "x.yaml"}, "there is no 'x.yaml' for megatron. Maybe 'launch.sh'."),
    ):
        refused = client.get(f"{path}/export", params=wrong)
        assert (refused.status_code, part in refused.json()["detail"]) == (422, True), refused.text
    other = plan | {"config": plan["config"] | {"model_type": "olmo2"}}
    with pytest.raises(
        HttpError, match=r"of the plan, model is of model_type 'olmo2'.* Maybe --to automodel\."
    ) as raised:
        launch(json.dumps(other).encode(), "megatron")
    assert [(fault.pointer, fault.code) for fault in raised.value.faults] == [("", "cannot_run")]


def test_a_model_that_is_given_whole_is_read_in_the_pool(idle: Client, tasks: list[str]) -> None:
    """A few words may be of thousands of layers."""
    name = JOB["model"]
    for model in (name, named_models()[name]):
        assert idle.post("/v1/plans", json=JOB | {"model": model}).status_code == 202
    assert tasks == ["parse_plan"]


def test_what_jobs_have(idle: Client) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = (idle.post("/v1/plans", json=JOB, headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == 202
    assert first.json()["id"] == second.json()["id"]
    path = first.headers["location"]
    assert idle.patch(path, json={"name": "renamed", "note": "for later"}).json()["name"] == "renamed"
    for not_yet in ("plan", "export?to=megatron"):
        assert idle.get(f"{path}/{not_yet}").json()["errors"][0]["code"] == "no_schedule"
    assert idle.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert idle.post(f"{path}/retry").json()["status"] == "queued"
    solve = idle.post("/v1/schedules", json=idle.get("/v1/demo-data/tiny").json()).json()["id"]
    for other in (f"/v1/plans/{solve}/plan", f"/v1/plans/{solve}/request", f"/v1/schedules/{path[10:]}/problem"):
        assert idle.get(other).status_code == 404, other


def test_nothing_fits(client: Client) -> None:
    body = JOB | {"model": "llama-3.1-405b", "gpus": 8, "fixed": {}}
    job = client.post("/v1/plans", params={"wait": 50}, json=body).json()
    assert (job["status"], job["termination"]) == ("failed", {"reason": "infeasible", "limit": None})
    assert re.search(r"nothing fits: the least that is needed is \d+ GiB of 80, .*, with tp8.*\. Maybe", job["error"])
    illegal = client.post("/v1/plans", params={"wait": 50}, json=JOB | {"fixed": {"tp": 7}}).json()
    assert illegal["status"] == "failed"
    assert "tp is 7 but must divide the 32 heads and the 16 GPUs. Maybe 4 or 8." in illegal["error"]


CONFIG = dict(named_models()["llama-3.1-8b"])
MACHINE = named_machines()["h200"].model_dump(exclude_none=True)
FACTS = MACHINE["facts"]


@pytest.mark.parametrize(
    ("change", "pointer", "part"),
    [
        ({"model": "llama-3.1-8"}, "/model", "Maybe 'llama-3.1-8b'."),
        ({"model": "../../etc/passwd"}, "/model", "no known model"),
        ({"model": CONFIG | {"num_hidden_layers": 10**9}}, "/model/num_hidden_layers", "at most 10000"),
        ({"model": CONFIG | {"hidden_size": -1}}, "/model/hidden_size", "an integer from 1"),
        ({"model": {}}, "/model/hidden_size", "is missing"),
        ({"gpus": 10**12}, "/gpus", "less than or equal to 1048576"),
        ({"machine": "/dev/zero"}, "/machine", "no known machine"),
        ({"machine": MACHINE | {"facts": FACTS | {"link_bytes_per_s": -1}}}, "/machine/facts/link_bytes_per_s", "-1"),
        ({"machine": MACHINE | {"facts": FACTS | {"gpus_per_node": 0}}}, "/machine/facts/gpus_per_node", "0"),
        ({"model": "gpt2-xl"}, "/sequence", "is 4,096 but gpt2-xl learns 1,024 positions"),
        ({"sequence": 0}, "/sequence", "greater than or equal to 1"),
        ({"global_batch": 10**9}, "/global_batch", "1000000"),
        ({"fixed": {"pq": 4}}, "/fixed/pq", "these are tp, cp,"),
        ({"fixed": {"tp": "8"}}, "/fixed/tp", "must be numbers"),
        ({"fixed": {"tp": list(range(1, 200))}}, "/fixed/tp", "1 to 100"),
        ({"fixed": {"overlap": "maybe"}}, "/fixed/overlap", "no, yes"),
        ({"fixed": {"vocabulary": "all"}}, "/fixed/vocabulary", "last, own, spread"),
        ({"fixed": {"recompute": ["some"]}}, "/fixed/recompute", "none, selective, full"),
        ({"config": {"time_limit_s": 10**5}}, "/config/time_limit_s", "max_time_limit_s"),
        ({"config": {"method": "milp"}}, "/config/method", "not a field"),
    ],
)
def test_what_is_refused(idle: Client, change: dict[str, Any], pointer: str, part: str) -> None:
    answer = idle.post("/v1/plans", json=JOB | change)
    assert answer.status_code == 422, answer.text
    [fault] = answer.json()["errors"]
    assert (fault["pointer"], part in fault["detail"]) == (pointer, True), fault


def test_large_and_odd_bodies_are_refused(idle: Client) -> None:
    padded = JOB | {"model": CONFIG | {"junk": "x" * INLINE_BYTES}}
    assert idle.post("/v1/plans", json=padded).status_code == 202
    padded["gpus"] = 0
    assert idle.post("/v1/plans", json=padded).json()["errors"][0]["pointer"] == "/gpus"
    huge = json.dumps(JOB | {"model": CONFIG | {"junk": "x" * 2**20}})
    assert idle.post("/v1/plans", content=huge, headers={"Content-Type": "application/json"}).status_code == 413
    nan = json.dumps(JOB | {"machine": MACHINE | {"facts": FACTS | {"link_bytes_per_s": float("nan")}}})
    answer = idle.post("/v1/plans", content=nan, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (400, "not_finite")


def test_models_and_machines(idle: Client) -> None:
    models = {one["name"]: one["parameters"] for one in idle.get("/v1/models").json()["models"]}
    assert models["llama-3.1-405b"] == 405_853_388_800
    machines = idle.get("/v1/machines")
    named = {one["name"]: one for one in machines.json()["machines"]}
    assert named.keys() == named_machines().keys()
    assert idle.post("/v1/plans", json=JOB | {"machine": named["b200"]}).status_code == 202
    assert idle.get("/v1/machines", headers={"If-None-Match": machines.headers["etag"]}).status_code == 304
