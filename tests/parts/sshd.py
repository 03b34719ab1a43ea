"""A real OpenSSH server on loopback, with keys of its own, that tests may kill, freeze and bring back."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.parts.missing import program

START_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path) -> Path:
    path.unlink(missing_ok=True)
    subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=20)
    return path


@dataclass
class Sshd:
    """`folder` holds its config, keys and log. `environment` is what its sessions see."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    extra: str = ""
    port: int = field(default_factory=free_port)
    user: str = field(default_factory=getpass.getuser)
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.host_key, self.identity = make_key(self.folder / "host_key"), make_key(self.folder / "id_ed25519")
        (self.folder / "authorized_keys").write_text(self.identity.with_suffix(".pub").read_text())
        self.known_hosts = self.folder / "known_hosts"
        self.vouch()

    def vouch(self) -> None:
        """Write the host key, as it is now, into known_hosts."""
        kind, key, *_ = self.host_key.with_suffix(".pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def start(self) -> None:
        """Start and wait until it listens."""
        Path("/run/sshd").mkdir(exist_ok=True) if os.getuid() == 0 else None
        config = self.folder / "sshd_config"
        environment = " ".join(f'{k}="{v}"' for k, v in self.environment.items())
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.host_key}\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPidFile {self.folder}/pid\nLogLevel ERROR\n"
            f"PasswordAuthentication no\nAllowStreamLocalForwarding yes\n"
            + (f"SetEnv {environment}\n" if environment else "")
            + self.extra
        )
        command = [program("sshd"), "-D", "-f", str(config), "-E", str(self.folder / "log")]
        self._process = subprocess.Popen(command, start_new_session=True)
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    log = (self.folder / "log").read_text() if (self.folder / "log").exists() else ""
                    raise RuntimeError(f"sshd did not start: {log}") from None
                time.sleep(0.02)

    def sessions(self) -> list[int]:
        """Process ids of the server and everything below it."""
        assert self._process is not None
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            try:
                todo += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                pass
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its sessions."""
        for pid in self.sessions():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def stop(self) -> None:
        """Kill the server with its sessions, as a node that dies does."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None


@pytest.fixture
def make_sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Make servers; all are stopped at the end."""
    program("sshd")
    made: list[Sshd] = []

    def make(environment: dict[str, str] | None = None, extra: str = "") -> Sshd:
        folder = tmp_path / f"sshd{len(made)}"
        folder.mkdir(mode=0o700)
        server = Sshd(folder, environment or {}, extra)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.stop()
