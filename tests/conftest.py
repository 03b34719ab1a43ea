from hypothesis import HealthCheck, settings

PARTS = ("nvml", "sshd", "console", "terminal", "prometheus", "slurm", "hook")
pytest_plugins = [f"tests.parts.{name}" for name in PARTS]

# Machines are noisy: an example that is slow once says nothing about the code.
settings.register_profile("rackside", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rackside")
