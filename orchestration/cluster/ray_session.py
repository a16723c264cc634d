"""Join the Ray cluster that RAY_ADDRESS names, or start one on this machine."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray

from orchestration.cluster.loopback import ray_on_loopback
from orchestration.cluster.orphan_reaper import orphan_reaper

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def started_ray() -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it), or start one on this machine, and leave it
    after. One that is started here listens on loopback only.

    A Ray that is already initialised in this process is used and left alone.
    """
    if ray.is_initialized():
        yield
        return
    paths = [str(ROOT), os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    joins = os.environ.get("RAY_ADDRESS", "local") not in ("", "local")
    reach: AbstractContextManager[dict[str, str]] = nullcontext({}) if joins else ray_on_loopback()
    with reach as own:
        init_ray(
            address=os.environ["RAY_ADDRESS"] if joins else "local",  # None would join what `ray start` left here
            include_dashboard=None if joins else False,
            logging_level=logging.WARNING,
            log_to_driver=False,  # actors write to files in the run directory
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}},
            **own,
        )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler exits with another code and says nothing
    try:
        with orphan_reaper():
            yield
    finally:
        ray.shutdown()


def init_ray(**options: Any) -> None:
    """Call `ray.init`, and once more when Ray's own processes did not start within its 30 s, as on a busy machine.

    Ray reports that as a plain Exception. What the first attempt leaves behind ends with this process.
    """
    try:
        ray.init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        logging.getLogger(__name__).warning(
            "Ray did not start within its 30 s, perhaps because the machine is busy; it is started once more"
        )
        ray.shutdown()
        ray.init(**options)
