pytest_plugins = ["tests.parts.nvml", "tests.parts.sshd"]
