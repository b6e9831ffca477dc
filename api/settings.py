"""Settings of the service: from a TOML file, from the environment, from the command line; the later ones win.

``OPTPIPE_MAX_OPS=50000`` in the environment is ``max_ops = 50000`` in the file that ``OPTPIPE_CONFIG_FILE`` names.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from optpipe.document import read_toml
from optpipe.document_kinds import SERVICE_SETTINGS
from optpipe.errors import InputError, Issue
from solver.limits import available_cores

CONFIG_FILE = "OPTPIPE_CONFIG_FILE"
"""The environment variable that names the TOML file."""

MOST_FILE_BYTES = 2**20
"""Size limit of that file."""


SITES = Path(__file__).parent / "web" / "docs", Path(__file__).parents[1] / "out" / "docs"
"""Folders where the documentation may be: in a wheel of ``make dist``, and in a checkout after ``make docs``."""


class Settings(BaseSettings):
    """Everything that can be set, with its range. Load it with `Settings.load`."""

    model_config = SettingsConfigDict(env_prefix="OPTPIPE_", extra="forbid", frozen=True)

    database_url: SecretStr | None = None
    """``postgresql://user:password@host/database``; None: a PostgreSQL of its own under `data_folder`."""
    data_folder: Path = Field(default_factory=lambda: default_data_folder())
    """Folder of the embedded PostgreSQL."""
    docs_folder: Path = next(filter(Path.is_dir, SITES), SITES[-1])
    """Folder of the documentation, which is served under ``/docs/`` where it was built."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    require_keys: bool = False
    """Ask for bearer keys on a loopback address too (behind a proxy); elsewhere they are always asked for."""

    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Larger requests are refused before they are read to the end."""
    max_ops: int = Field(default=50_000, ge=1)
    """Ops of a problem (`solver.scale.count_ops`): larger ones are refused before anything is built."""
    max_time_limit_s: float = Field(default=3600.0, gt=0)
    max_workers: int = Field(default_factory=available_cores, ge=1)
    """Threads that one job may ask for, in all workers together."""
    max_queued_jobs: int = Field(default=1000, ge=1)
    """Jobs of one key that may wait or run at a time."""
    max_submissions_a_minute: int = Field(default=600, ge=1)
    """Jobs that one key may submit, or have tried again, in any sixty seconds."""
    max_stored_bytes: int = Field(default=4 * 2**30, ge=1)
    """Bytes of problems, schedules, notes and events that are stored for the jobs of one key."""
    max_heavy_seconds_a_minute: float = Field(default_factory=lambda: 30.0 * available_cores(), gt=0)
    """Seconds that analyses, comparisons, pictures and large bodies of one key may take in any sixty."""
    max_running_jobs: int | None = Field(default=None, ge=1)
    """Jobs of one key that run at a time; None: all places of each worker but one, where it has several."""

    keep_jobs_days: float = Field(default=30.0, gt=0)
    """Ended jobs are removed after this many days."""
    keep_jobs: int = Field(default=10_000, ge=0)
    """Maximum number of ended jobs of one key; its oldest are removed first."""

    serve_worker: bool = True
    """`optpipe serve` starts a worker, which solves several jobs at a time; false: all workers run elsewhere."""
    solves: int = Field(default_factory=available_cores, ge=1, le=256)
    """Jobs that one worker solves at a time."""
    threads_per_job: int = Field(default_factory=available_cores, ge=1)
    """Threads that one worker gives to a job; a job that asks for more is helped by workers that have nothing to do."""
    job_memory_bytes: int | None = Field(default=None, ge=2**20)
    """Memory of one solve; None: an equal share of 80 % of what is free when the worker starts."""
    heartbeat_s: float = Field(default=5.0, ge=1.0, le=600.0)
    """Heartbeat timeout: a worker silent for this long is considered lost, and its jobs run again elsewhere."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on `host` where a worker serves its metrics; None: nowhere."""
    log_json: bool = False
    """Log one JSON object a line instead of text."""

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Settings of this process; `given` wins, except where it is None.

        Raises InputError, also where the file that CONFIG_FILE names is not there or is no TOML.
        """
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            # The values stay out of the message: one of them may be a password.
            issues = [
                Issue(entry["loc"], "bad_setting", f"is invalid: {entry['msg'][:1].lower()}{entry['msg'][1:]}.")
                for entry in error.errors(include_input=False, include_url=False)
            ]
            raise InputError(issues, "settings") from None

    @property
    def keys_required(self) -> bool:
        """True if every request except `/healthz` must carry a key."""
        try:
            loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = self.host == "localhost"
        return self.require_keys or not loopback

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order of the sources: what was given, the environment, the file."""
        file = os.environ.get(CONFIG_FILE)
        from_file = (
            [InitSettingsSource(settings_cls, read_toml(Path(file), MOST_FILE_BYTES, SERVICE_SETTINGS))] if file else []
        )
        return (init_settings, env_settings, *from_file)


def default_data_folder() -> Path:
    """Data folder of this user. For root the one of system services: PostgreSQL never runs as root, and the user that
    it runs as cannot enter root's home."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and not os.environ.get("XDG_DATA_HOME"):
        return Path("/var/lib/optpipe")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "optpipe"
