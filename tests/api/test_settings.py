"""Settings: where they come from, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.settings import CONFIG_FILE, Settings
from optpipe.errors import InputError


def test_the_later_ones_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "optpipe.toml"
    file.write_text('port = 1\nmax_ops = 2\nheartbeat_s = 3.5\nhost = "::1"\n')
    monkeypatch.setenv(CONFIG_FILE, str(file))
    monkeypatch.setenv("OPTPIPE_MAX_OPS", "20")
    monkeypatch.setenv("OPTPIPE_PORT", "10")
    settings = Settings.load(port=100, host=None)
    assert (settings.port, settings.max_ops, settings.heartbeat_s, settings.host) == (100, 20, 3.5, "::1")


def test_bad_ones_are_named_without_their_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPIPE_PORT", "secret")
    with pytest.raises(InputError) as raised:
        Settings.load(no_such_setting=1)
    assert {issue.pointer for issue in raised.value.issues} == {"port", "no_such_setting"}
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing.toml", "cannot be read: No such file"), (".", "cannot be read"), ("broken.toml", "is not TOML")],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    (tmp_path / "broken.toml").write_text("port = = 3")
    monkeypatch.setenv(CONFIG_FILE, str(tmp_path / name))
    with pytest.raises(InputError, match=said) as raised:
        Settings.load()
    assert raised.value.source == str(tmp_path / name)


@pytest.mark.parametrize(
    ("host", "required"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("gpu7", True)],
)
def test_keys_off_loopback(host: str, required: bool) -> None:
    assert Settings.load(host=host).keys_required is required
    assert Settings.load(host=host, require_keys=True).keys_required
