"""A Control on real nodes: an inventory as a user writes it, sshd servers behind it, its own audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.act.action import Proposal, Stage, Ticket
from engine.act.audit import Audit
from engine.control.connect import sources
from engine.control.control import Control
from engine.control.events import Event, TicketChanged
from engine.job.status import JobStatus
from engine.profile import catalog
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import Backoff
from tests.parts.nvml import FakeNvml
from tests.parts.sshd import Sshd
from tests.parts.waiting import until

INTERVAL_S = 0.2
MakeSshd = Callable[..., Sshd]


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "MOST_S", 0.5)


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    folder = tmp_path / "hooks"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def inventory(tmp_path: Path, nvml: FakeNvml, make_sshd: MakeSshd, hooks: Path) -> Path:
    """One node with eight H100s, whose login looks for hooks in `hooks`."""
    nvml.write(8)
    server = make_sshd({**nvml.environment, "RACKSIDE_HOOK_DIR": str(hooks)})
    return write_inventory(tmp_path / "lab.yaml", [server])


def write_inventory(path: Path, servers: Sequence[Sshd]) -> Path:
    """The smallest file that leads to these servers."""
    known = path.with_name("all_known_hosts")
    known.write_text("".join(s.known_hosts.read_text() for s in servers))
    nodes = "".join(
        f'  - {{name: n{i}, type: hgx-h100, rack: r1, u: {10 * i}, ssh: "{s.user}@127.0.0.1:{s.port}"}}\n'
        for i, s in enumerate(servers, 1)
    )
    for server in servers[1:]:  # one key opens all
        (server.folder / "authorized_keys").write_text(servers[0].identity.with_suffix(".pub").read_text())
    path.write_text(
        f"name: test\nnodes:\n{nodes}ssh: {{known_hosts: {known}, identity: {servers[0].identity}}}\n"
        f"poll_interval_s: {INTERVAL_S}\n"
    )
    return path


@dataclass
class Console:
    """A running control with everything it told."""

    control: Control
    audit: Audit
    events: list[Event] = field(default_factory=list)

    async def live(self) -> None:
        nodes = lambda: self.control.snapshot.nodes  # noqa: E731
        await until(lambda: all(n.state is NodeState.LIVE for n in nodes()), 30, "all nodes live")

    async def job(self, ready: Callable[[JobStatus], object] = lambda j: j.step_s) -> JobStatus:
        """The current job, once it is attached and `ready`."""

        def there() -> bool:
            job = self.control.jobs.current
            return job is not None and job.attached and bool(ready(job))

        await until(there, 60, "a job attached")
        job = self.control.jobs.current
        assert job is not None
        return job

    async def does(self, proposal: Proposal, timeout_s: float = 60) -> Ticket:
        """Arm, confirm and wait for the end."""
        assert not proposal.refusal, proposal.refusal
        self.control.arming.arm()
        return await self.ended(self.control.confirm(proposal), timeout_s)

    async def ended(self, ticket: Ticket, timeout_s: float = 60) -> Ticket:
        def now() -> Ticket:
            return next(t for t in self.control.tickets if t.id == ticket.id)

        await until(lambda: now().stage.ended, timeout_s, f"{ticket.proposal.title} ends")
        return now()

    def stages(self, ticket: Ticket) -> list[Stage]:
        return [e.ticket.stage for e in self.events if isinstance(e, TicketChanged) and e.ticket.id == ticket.id]


@asynccontextmanager
async def console(inventory: Path, read_only: bool = False) -> AsyncIterator[Console]:
    """Open a control on an inventory and run it."""
    cluster = catalog.cluster(str(inventory))
    audit = Audit(inventory.with_name("audit.jsonl"))
    control = Control(cluster, sources(cluster), catalog.thermal_policy("margin"), audit, "ops@test", read_only)
    found = Console(control, audit)

    async def listen() -> None:
        async for event in control.events():
            found.events.append(event)

    listener = asyncio.create_task(listen())
    try:
        async with control.running():
            yield found
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
