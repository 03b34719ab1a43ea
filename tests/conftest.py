import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

PARTS = ("nvml", "sshd", "console", "terminal", "prometheus", "slurm", "hook")
pytest_plugins = [f"tests.parts.{name}" for name in PARTS]

# Machines are noisy: an example that is slow once says nothing about the code.
settings.register_profile("rackside", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rackside")


@pytest.fixture(scope="session", autouse=True)
def _state_of_nobody() -> Iterator[None]:
    """Whoever runs the tests has alarms, actions and a look of their own: no test reads or changes them."""
    with tempfile.TemporaryDirectory(prefix="rackside-state") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield
