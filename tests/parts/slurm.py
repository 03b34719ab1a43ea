"""A real Slurm of one node on loopback, as whoever runs the tests: its own munge, controller, node daemon and ports."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.parts.missing import program
from tests.parts.sshd import free_port

START_S, COMMAND_S = 30.0, 20.0
GPUS = 4

CONF = """
ClusterName=rackside
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
MessageTimeout=5
SchedulerParameters=sched_interval=1,defer,batch_sched_delay=0
SchedulerTimeSlice=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=8 Gres=gpu:{gpus}
PartitionName=train Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """`folder` holds its files; `environment` is what makes squeue, sbatch and scontrol speak to it."""

    folder: Path
    node: str = "gpu-node-1"
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start everything and wait until the node takes jobs."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        for slot in range(GPUS):
            (self.folder / f"gpu{slot}").touch()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        host = socket.gethostname().partition(".")[0]
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=host,
                node=self.node,
                folder=self.folder,
                user=pwd.getpwuid(os.getuid()).pw_name,
                controller_port=free_port(),
                node_port=free_port(),
                gpus=GPUS,
            )
        )
        (self.folder / "gres.conf").write_text(f"NodeName={self.node} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        of = {name: str(self.folder / f"munge.{name}") for name in ("key", "socket", "pid", "log", "seed")}
        munged = [program("munged"), "--foreground", "--force", f"--key-file={of['key']}", f"--socket={of['socket']}"]
        self._start(
            "munged", [*munged, f"--pid-file={of['pid']}", f"--log-file={of['log']}", f"--seed-file={of['seed']}"]
        )
        self.until(Path(of["socket"]).exists, "munged does not listen")
        self.start_controller()
        self._start("slurmd", [program("slurmd"), "-D", "-N", self.node, "-f", str(self.folder / "slurm.conf")])
        self.until(lambda: self.command("sinfo", "-h", "-o", "%T").strip() in ("idle", "mixed"), "the node is not idle")

    def start_controller(self) -> None:
        """Start slurmctld, again after `stop_controller`, and wait until it answers."""
        self._start("slurmctld", [program("slurmctld"), "-D", "-f", str(self.folder / "slurm.conf")])
        self.until(lambda: "UP" in self.command("scontrol", "ping"), "slurmctld does not answer")

    def stop_controller(self) -> None:
        """Kill slurmctld: jobs go on, nobody answers for them."""
        found = self._running.pop("slurmctld")
        found.kill()
        found.wait(10)

    def freeze_controller(self, frozen: bool = True) -> None:
        """Let slurmctld take connections and say nothing; or go on."""
        self._running["slurmctld"].send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def command(self, name: str, *words: str) -> str:
        """What one of Slurm's commands prints; RuntimeError when it fails."""
        ran = subprocess.run(
            [program(name), *words], env=self.environment, capture_output=True, text=True, timeout=COMMAND_S
        )
        if ran.returncode:
            raise RuntimeError(f"{name} {' '.join(words)}: {ran.stderr}")
        return ran.stdout

    def submit(self, *options: str, script: str = "exec sleep 600") -> str:
        """A batch job's id; without options it runs until it is cancelled."""
        words = ["--parsable", "--output=/dev/null", *options, f"--wrap={script}"]
        return self.command("sbatch", *words).strip().partition(";")[0]

    def state(self, job: str) -> str:
        """A job's state, empty when Slurm does not know it any more."""
        for found in json.loads(self.command("squeue", "--json"))["jobs"]:
            if str(found["job_id"]) == job:
                told: Any = found["job_state"]
                return str(told[0] if isinstance(told, list) else told)
        return ""

    def until_state(self, job: str, *states: str) -> None:
        """Wait until a job is in one of the states."""
        self.until(lambda: self.state(job) in states, f"job {job} does not become {' or '.join(states)}")

    def cancel_all(self) -> None:
        """Cancel every job and wait until the node is free."""
        self.command("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
        self.until(lambda: self.command("sinfo", "-h", "-o", "%T").strip() == "idle", "jobs do not end")

    def until(self, happened: Callable[[], object], what: str) -> None:
        """Wait until it is so; RuntimeError with the daemons' logs when it does not come or one of them ends."""
        ends = time.monotonic() + START_S
        while True:
            try:
                if happened():
                    return
            except (RuntimeError, subprocess.TimeoutExpired):
                pass
            gone = [name for name, process in self._running.items() if process.poll() is not None]
            if gone or time.monotonic() > ends:
                logs = "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in self.folder.glob("*.out"))
                raise RuntimeError(f"{what}; ended: {gone or 'none'}\n{logs}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Cancel what runs and kill the daemons, those who depend on others first."""
        if "slurmctld" in self._running:
            self.freeze_controller(False)
            try:
                self.cancel_all()
            except (RuntimeError, subprocess.TimeoutExpired):
                pass
        for name in ("slurmctld", "slurmd", "munged"):
            if name in self._running:
                self._running[name].kill()
                self._running.pop(name).wait(10)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=self.environment
            )


@pytest.fixture(scope="session")
def slurm_server() -> Iterator[Slurm]:
    """One Slurm for the whole session."""
    for name in ("slurmctld", "slurmd", "munged", "squeue", "sbatch"):
        program(name)
    # Not pytest's folder: its path is too long for munge's socket.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    found = Slurm(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(slurm_server: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The session's Slurm without jobs, found by commands of the test's own process; its jobs end with the test."""
    monkeypatch.setenv("SLURM_CONF", slurm_server.environment["SLURM_CONF"])
    yield slurm_server
    slurm_server.cancel_all()
