"""Pictures of every state of the service's page: `python -m examples.page_pictures --out docs/pictures/page`.

Starts a service with a database of its own in a temporary folder, submits jobs, and photographs the page in Debian's
Chromium, light, dark and as on a telephone. Needs Chromium (`make browser`).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import httpx
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from examples.pictures.blocks import along_a_v
from examples.pictures.spread import on_every_device
from instances import instance, uniform
from optpipe.problem import Problem
from solver.solve import solve

CHROMIUM = "/usr/bin/chromium-headless-shell"
WAIT_MS = 60_000
SHOWN = "figure[data-magnification]"

OFFLOADED = uniform(
    4, 12, budget=5, name="four devices, offload", offload={"bytes": 2, "offload_us": 7, "reload_us": 9}
)
WIDE = uniform(32, 64, budget=64, name="32 devices")
HARD = uniform(6, 18, budget=4, name="six devices, offload", offload={"bytes": 2, "offload_us": 11, "reload_us": 11})
RECOMPUTED = Problem.from_data(
    {
        "format": "optpipe.problem/1",
        "name": "recomputation where it fits",
        "microbatches": 6,
        "devices": [{"memory_bytes": 14}] * 3,
        "stages": [
            {
                "device": device,
                "forward_us": 10,
                "backward_input_us": 10,
                "backward_weight_us": 10,
                "activation_bytes": 6,
                "backward_weight_bytes": 3,
                "modes": [{"name": "full", "kept_bytes": 1, "recompute_us": 8, "segment_bytes": 5}],
            }
            for device in range(3)
        ],
    }
)
SLICED = instance("q-p4-m4-n4-fused-b8")
TIGHT = uniform(4, 8, budget=1, name="too little memory")


@dataclass(frozen=True)
class Look:
    """Window and colours of a picture."""

    scheme: Literal["light", "dark"] = "light"
    width: int = 1366
    height: int = 900
    touch: bool = False
    whole: bool = True
    """True: the picture has all of the page, False: what is in view."""


LIGHT, DARK, PHONE = Look(), Look("dark"), Look(width=390, height=844, touch=True)


@dataclass(frozen=True)
class Service:
    """The service that is photographed, with a client of it."""

    url: str
    client: httpx.Client

    def job(self, problem: Problem, wait: float = 60, **config: Any) -> str:
        """The id of a new job; waits for its end unless `wait` is 0."""
        body = {"problem": problem.to_data(), "config": {"seed": 1, **config}}
        answer = self.client.post("/v1/schedules", params={"wait": wait}, json=body).raise_for_status()
        return str(answer.json()["id"])

    def running(self) -> str:
        """The id of a job that is being solved and has a schedule; there is one at a time."""
        jobs = self.client.get("/v1/schedules", params={"status": "running"}).json()["jobs"]
        job = str(jobs[0]["id"]) if jobs else self.job(HARD, 0, method="search", time_limit_s=600, tags=["night"])
        until = time.monotonic() + WAIT_MS / 1000
        while self.client.get(f"/v1/schedules/{job}").json()["value_us"] is None and time.monotonic() < until:
            time.sleep(0.2)
        return job


Photograph = Callable[[Service, Page], None]


def job_light(service: Service, page: Page) -> None:
    """A finished job."""
    page.goto(f"/#/jobs/{service.job(OFFLOADED, method='auto', time_limit_s=5, name=OFFLOADED.name)}")
    expect(page.locator(SHOWN)).to_be_visible()


def critical_path(service: Service, page: Page) -> None:
    """The critical path, and an op with its dependencies."""
    job_light(service, page)
    page.get_by_label("Critical path").check()
    page.get_by_label("Find an op").fill("B1.5")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).to_be_visible()


def all_devices(service: Service, page: Page) -> None:
    """Thirty-two devices, a quarter of the time."""
    page.goto(f"/#/jobs/{service.job(WIDE, method='zb-h1')}")
    expect(page.locator(SHOWN)).to_be_visible()
    page.get_by_role("button", name="Zoom in").click(click_count=3)


def full_screen(service: Service, page: Page) -> None:
    """Full screen, all devices in view."""
    all_devices(service, page)
    page.get_by_role("button", name="Full screen").click()
    page.locator("[data-part=fit]").click()


def running(service: Service, page: Page) -> None:
    """A search under way."""
    page.goto(f"/#/jobs/{service.running()}")
    expect(page.locator(SHOWN)).to_be_visible()
    expect(page.locator(".curve-dot").nth(1)).to_be_visible()
    page.get_by_text("Schedules found", exact=True).click()


def compare(service: Service, page: Page) -> None:
    """Searches and schedules of one problem under several budgets."""
    budgets = (4, 6, 8)
    problems = [
        uniform(4, 10, budget=budget, name=f"budget {budget}", offload={"bytes": 2, "offload_us": 9, "reload_us": 9})
        for budget in budgets
    ]
    ids = [service.job(problem, method="search", time_limit_s=3) for problem in problems]
    page.goto(f"/#/compare?ids={','.join(ids)}")
    expect(page.locator(SHOWN)).to_have_count(len(budgets))


LLAMA = "/#/plan?model=llama-3.1-70b&machine=h100&gpus=64&sequence=8192&batch=512&pp=4,8&limit=20"


def plan_light(_: Service, page: Page) -> None:
    """A plan with the schedule of its best strategy."""
    page.goto(LLAMA)
    expect(page.locator("[data-part=strategies] tr").first).to_be_visible()
    expect(page.locator("[data-part=cancel]")).to_be_hidden()
    expect(page.locator(SHOWN)).to_be_visible()


def plan_front(_: Service, page: Page) -> None:
    """The front door."""
    page.goto("/")
    expect(page.locator("#plan-machine")).to_have_value("h100")


def plan_running(_: Service, page: Page) -> None:
    """A plan under way."""
    page.goto(LLAMA.replace("batch=512", "batch=1024").replace("limit=20", "limit=40"))
    expect(page.locator("[data-part=cancel]")).to_be_visible()
    expect(page.locator(SHOWN)).to_be_visible()


def plan_faults(_: Service, page: Page) -> None:
    """Faults of a plan at their fields."""
    page.goto("/#/plan?model=llama-3.1-8b&machine=h100&gpus=lots&sequence=8192&batch=512&tp=0")
    expect(page.locator("#plan-gpus-fault")).to_contain_text("lots")


def plan_none(_: Service, page: Page) -> None:
    """Nothing fits."""
    page.goto("/#/plan?model=llama-3.1-405b&machine=h100&gpus=16&sequence=8192&batch=512")
    expect(page.locator("[data-part=state]")).to_contain_text("Nothing fits")


def plan_beaten(service: Service, page: Page) -> None:
    """A strategy that is beaten, open."""
    plan_light(service, page)
    page.get_by_label("Strategies to show").select_option("beaten")
    page.locator("[data-end=beaten] [data-part=open]").first.click()
    page.wait_for_timeout(1500)


def plan_launch(service: Service, page: Page) -> None:
    """Launch files of a plan."""
    plan_light(service, page)
    page.get_by_label("Trainer", exact=True).select_option("torchtitan")
    expect(page.get_by_role("region", name="launch.sh")).to_be_visible()
    page.locator(".launch").evaluate("panel => panel.scrollIntoView()")


def infeasible(service: Service, page: Page) -> None:
    """A problem that is proved infeasible, with the budgets that would do."""
    page.goto(f"/#/jobs/{service.job(TIGHT, method='cp-sat')}")
    expect(page.locator("[data-part=remedy]")).to_be_visible()


def new_light(_: Service, page: Page) -> None:
    """A new problem with its published schedules."""
    page.goto("/#/new")
    page.select_option("#preset", "offload")
    page.fill("#backward-weight", "1.6 ms")
    expect(page.locator(SHOWN)).to_be_visible()


def helped(service: Service, page: Page) -> None:
    """A term explained."""
    new_light(service, page)
    page.get_by_role("button", name="Backward weight").click()


DROP = """([name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  for (const kind of ["dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, {dataTransfer, bubbles: true}));
  }
}"""
"""Drops a file on the page."""


def dropped(_: Service, page: Page) -> None:
    """A schedule that was dropped, next to the published ones."""
    page.goto("/#/jobs")
    page.evaluate(DROP, ["mine.json", solve(OFFLOADED, "zb-auto").to_json()])
    page.get_by_role("link", name="Add published schedules").click()
    expect(page.locator(SHOWN).nth(2)).to_be_visible()


def refused(_: Service, page: Page) -> None:
    """A file that does not open on the page."""
    page.goto("/#/compare")
    page.evaluate(DROP, ["model.layers.json", '{"format": "optpipe.layers/1"}'])
    expect(page.locator("[data-part=file-message]")).to_contain_text("layer profile")


def jobs(service: Service, page: Page) -> None:
    """The list of jobs, of all kinds."""
    service.running()
    if not service.client.get("/v1/schedules", params={"name": "nightly"}).json()["jobs"]:
        service.job(OFFLOADED, 60, method="auto", time_limit_s=5, name="nightly", tags=["night", "ci"])
        service.job(WIDE, method="zb-h1")
        service.job(TIGHT, method="cp-sat")
    page.goto("/#/jobs")
    rows = page.locator("[data-part=jobs] tr")
    expect(rows.nth(3)).to_be_visible()
    for row in (1, 2):
        rows.nth(row).get_by_role("checkbox").check()


def empty(_: Service, page: Page) -> None:
    """A service without jobs."""
    page.goto("/#/jobs")
    expect(page.locator("[data-part=empty]")).to_be_visible()


def faults(_: Service, page: Page) -> None:
    """Faults at their fields."""
    page.goto("/#/new")
    expect(page.locator("[data-part=check]")).to_contain_text("Valid")
    page.fill("#microbatches", "-3")
    page.fill("#forward", "soon")
    page.fill("#time-limit", "soon")
    expect(page.locator("#time-limit-fault")).to_contain_text("soon")
    expect(page.locator("#microbatches-fault")).to_contain_text("-3")


def published(_: Service, page: Page) -> None:
    """Published schedules of a problem side by side."""
    page.goto("/#/new")
    expect(page.locator("[data-part=check]")).to_contain_text("Valid")
    page.get_by_role("button", name="Compare published").click()
    expect(page.locator(SHOWN).first).to_be_visible()


def recomputing(service: Service, page: Page) -> None:
    """Recomputation ahead of and inside the backward."""
    page.goto(f"/#/jobs/{service.job(RECOMPUTED, method='cp-sat', time_limit_s=10)}")
    expect(page.locator(SHOWN)).to_be_visible()
    page.get_by_text("The chart as a table").click()


def spread(service: Service, page: Page) -> None:
    """A schedule with the passes of a vocabulary layer on every device."""
    page.goto(f"/#/jobs/{service.job(on_every_device(1), method='vocab-2', name='vocabulary on every device')}")
    expect(page.locator(SHOWN)).to_be_visible()


def blocks(service: Service, page: Page) -> None:
    """Blocks of a forward and a backward, one of them described."""
    page.goto(f"/#/jobs/{service.job(along_a_v(), method='dualpipe-v', name='DualPipeV')}")
    expect(page.locator(SHOWN)).to_be_visible()
    page.get_by_label("Find an op").fill("F0.7")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).to_be_visible()


def slices(service: Service, page: Page) -> None:
    """Slices of sequences, in a job with a note."""
    job = service.job(SLICED, method="seq1f1b", name="four slices a sequence")
    note = "Fused backwards, memory of eight slices: a search gets 1,497 us."
    service.client.patch(f"/v1/schedules/{job}", json={"note": note}).raise_for_status()
    page.goto(f"/#/jobs/{job}")
    expect(page.locator(SHOWN)).to_be_visible()
    page.get_by_role("button", name="Zoom in").click()


def lost(service: Service, page: Page) -> None:
    """The connection to the server is lost."""
    page.route("**/v1/events", lambda route: route.abort())
    page.goto(f"/#/jobs/{service.running()}")
    expect(page.locator("[data-part=connection]")).to_be_visible()
    expect(page.locator(SHOWN)).to_be_visible()


def delete(service: Service, page: Page) -> None:
    """A question before what cannot be undone."""
    jobs(service, page)
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.get_by_role("dialog")).to_be_visible()


def key(_: Service, page: Page) -> None:
    """The question for a key, as a server that asks for keys answers."""
    page.route("**/v1/**", lambda route: route.fulfill(status=401, json={"title": "Unauthorized"}))
    page.goto("/#/jobs")
    expect(page.get_by_role("dialog")).to_be_visible()


STATES: dict[str, tuple[Look, Photograph]] = {
    "plan-front": (LIGHT, plan_front),
    "plan-running": (LIGHT, plan_running),
    "plan-light": (LIGHT, plan_light),
    "plan-dark": (DARK, plan_light),
    "plan-phone": (PHONE, plan_light),
    "plan-faults": (LIGHT, plan_faults),
    "plan-none": (LIGHT, plan_none),
    "plan-beaten": (LIGHT, plan_beaten),
    "plan-launch": (Look(whole=False), plan_launch),
    "empty": (LIGHT, empty),
    "key": (LIGHT, key),
    "jobs-light": (LIGHT, jobs),
    "jobs-dark": (DARK, jobs),
    "jobs-phone": (PHONE, jobs),
    "delete": (LIGHT, delete),
    "new-light": (LIGHT, new_light),
    "new-dark": (DARK, new_light),
    "new-phone": (PHONE, new_light),
    "help": (Look(whole=False), helped),
    "faults": (LIGHT, faults),
    "published": (LIGHT, published),
    "dropped": (LIGHT, dropped),
    "refused": (PHONE, refused),
    "job-light": (LIGHT, job_light),
    "job-dark": (DARK, job_light),
    "job-phone": (PHONE, job_light),
    "critical-path": (LIGHT, critical_path),
    "all-devices": (LIGHT, all_devices),
    "full-screen": (DARK, full_screen),
    "recomputing": (LIGHT, recomputing),
    "blocks": (LIGHT, blocks),
    "spread": (LIGHT, spread),
    "slices": (LIGHT, slices),
    "running": (LIGHT, running),
    "lost": (LIGHT, lost),
    "infeasible": (LIGHT, infeasible),
    "compare-light": (LIGHT, compare),
    "compare-phone": (Look("dark", width=390, height=844, touch=True), compare),
}
"""States of the page by the name of their picture."""


@contextmanager
def serving() -> Iterator[str]:
    """A service of its own, with a worker, for as long as the context lasts."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        Path(folder).chmod(0o755)
        environment = {**os.environ, "OPTPIPE_DATA_FOLDER": f"{folder}/data"}
        command = [sys.executable, "-m", "optpipe", "serve", "--port", str(port)]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def wait_until_ready(client: httpx.Client) -> None:
    """Return once the service solves."""
    until = time.monotonic() + WAIT_MS / 1000
    while time.monotonic() < until:
        try:
            if client.get("/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("The service does not come up.")


def photograph(browser: Browser, service: Service, name: str, out: Path) -> None:
    """Write one picture."""
    look, show = STATES[name]
    context = open_context(browser, service, look)
    page = context.new_page()
    show(service, page)
    page.wait_for_timeout(500)
    picture = page.screenshot(full_page=look.whole and not page.locator("[data-full]").count())
    context.close()
    # A palette of 256 colours is all that the page needs, and takes a third of the bytes.
    Image.open(BytesIO(picture)).convert("RGB").quantize(256).save(out / f"{name}.png", optimize=True)
    print(out / f"{name}.png", flush=True)


def open_context(browser: Browser, service: Service, look: Look) -> BrowserContext:
    """A browser context with a window and colours."""
    expect.set_options(timeout=WAIT_MS)
    context = browser.new_context(
        base_url=service.url,
        viewport={"width": look.width, "height": look.height},
        color_scheme=look.scheme,
        has_touch=look.touch,
        is_mobile=look.touch,
        reduced_motion="reduce",
        device_scale_factor=1,
    )
    context.set_default_timeout(WAIT_MS)
    return context


def main() -> None:
    """Photograph all states, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/page"))
    parser.add_argument("--url", help="a service that runs already, without keys")
    parser.add_argument("names", nargs="*", help="pictures to take; default: all")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with serving() if arguments.url is None else _running(arguments.url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        with httpx.Client(base_url=url, timeout=120) as client:
            wait_until_ready(client)
            for name in arguments.names or STATES:
                photograph(browser, Service(url, client), name, arguments.out)


@contextmanager
def _running(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    main()
