"""Runs the blocks of a page as a reader would: in order, in one shell, in an empty folder with the examples beside.

Only searches and measurements are shorter than on the page, and a solve without a limit has one: what a longer one
finds is not compared with anything, and all pages together would keep two cores busy for minutes. So would loading
torch for each process: these are forked (`tests.forked`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.docs.blocks import COMMANDS, ROOT, Block

PATIENCE_S = 600.0
"""Only a page that hangs takes so long, whatever else the machine does."""
SERVE = re.compile(r"^optpipe serve\b[^#\n]*", re.MULTILINE)
ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):8000")
PROLOGUE = """set -euo pipefail
most_search_s=1
curl() { command curl --fail-with-body "$@"; }
optpipe() {
    local words=() word before= limited=
    for word in "$@"; do
        [ "$before" != --time-limit ] || [ "${word%.*}" -le $most_search_s ] || word=$most_search_s
        [ "$before" != --rounds ] || word=1
        case $word in --time-limit | --deterministic-limit) limited=yes ;; esac
        words+=("$word") before=$word
    done
    [ "$1" != solve ] || [ "$limited" ] || words+=(--time-limit $most_search_s)
    case "$* " in
        *" --rounds "* | *" --machine "*) ;;
        profile*" --model "*) words+=(--rounds 1) ;;
    esac
    command optpipe "${words[@]}"
}
serving=
trap '[ -z "$serving" ] || { kill "$serving"; wait "$serving"; } || true' EXIT
"""
IN_BACKGROUND = """exec {command} --port {port} > serve.log 2>&1 & serving=$!
until command curl -sSf http://127.0.0.1:{port}/readyz > ready.log 2>&1; do kill -0 $serving; sleep 0.2; done
"""


def run_page(blocks: Sequence[Block], folder: Path, port: int, commands: Path) -> None:
    """Run all blocks of commands, and compare what they print with what the page shows.

    `optpipe serve` runs on `port` in the background, until the page ends. What lies in the folder of `commands` takes
    the place of others of the same name.
    """
    for name in ("examples", "benchmarks/published"):
        shutil.copytree(ROOT / name, folder / name)
    script = SERVE.sub(lambda serve: IN_BACKGROUND.format(command=serve[0], port=port), "".join(_lines(blocks)))
    with TemporaryDirectory() as data:  # PostgreSQL needs a short path, which another user than root may enter
        Path(data).chmod(0o755)
        run = _bash(PROLOGUE + ADDRESS.sub(rf"\1:{port}", script), folder, data, commands)
    place = _read(folder / ".at")
    printed = _read(folder / f".out-{place}") + _read(folder / "serve.log")
    assert run == 0, f"line {place} ended with {run}:\n{printed}"
    before = None
    for block in blocks:
        if block.mark == "output":
            assert before, f"line {block.line}: no commands whose output this could be"
            check_output(block, _read(folder / f".out-{before.line}"))
        elif block.language in COMMANDS:
            before = block


def check_output(shown: Block, printed: str) -> None:
    """Every line that is shown was printed, in this order; a line of dots stands for some that are left out."""
    rest = printed
    for line in filter(str.strip, shown.text.splitlines()):
        if line.strip() in ("...", "…"):
            continue
        found = re.search(_pattern(line, exact=shown.says == "exact"), rest)
        assert found, f"line {shown.line}: {line!r} is shown, but this was printed:\n{printed}"
        rest = rest[found.end() :]


def _pattern(line: str, exact: bool) -> str:
    words = r"\s+".join(map(re.escape, line.split()))
    if exact:
        return words
    for units in ("µs|ms|s", "B|KiB|MiB|GiB"):  # another machine's times and sizes may need other ones
        words = re.sub(rf"(?<=\\s\+)(?:{units})(?!\w)", f"(?:{units})", words)
    return re.sub(r"\d(?:\d|\\?[.,](?=\d))*", r"[\\d.,]+", words)


def _lines(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        if block.mark == "file":
            yield f"cat > {shlex.quote(block.says)} <<'END_OF_FILE'\n{block.text}END_OF_FILE\n"
        elif block.language in COMMANDS and block.mark != "not run":
            yield from _commands(block)


def _commands(block: Block) -> Iterator[str]:
    text = block.text if block.language != "python" else f"python3 - <<'END_OF_PYTHON'\n{block.text}END_OF_PYTHON\n"
    yield f"echo {block.line} > .at\n"
    if block.mark == "exit":
        yield f"set +e\n{{\n{text}}} > .out-{block.line} 2>&1\ncode=$?\nset -e\n[ $code = {int(block.says)} ]\n"
    else:
        yield f"{{\n{text}}} > .out-{block.line} 2>&1\n"


def _bash(script: str, folder: Path, data: str, commands: Path) -> int:
    """The exit code of a script; whatever it started ends with it."""
    own = {
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHON_EXEC": str(commands / "python"),
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "XDG_DATA_HOME": data,
        "COLUMNS": "160",
        "OPTPIPE_KEY": "none-is-asked-for",
    }
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=os.environ | own, stdin=subprocess.DEVNULL, start_new_session=True
    ) as run:
        try:
            return run.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGTERM)
            return run.wait(10)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
