"""The whole loop on real parts: nodes behind OpenSSH, the probe on a driver, training jobs behind their hooks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.act import measure
from engine.act.action import Microbatch, Proposal, Rebalance, Stage, Throttle
from engine.act.audit import AuditError
from engine.control.control import Refused
from engine.job.status import JobStatus
from tests.parts.console import Console, console, write_inventory
from tests.parts.jobs import attached, saved, training
from tests.parts.nvml import FakeNvml
from tests.parts.sshd import Sshd
from tests.parts.waiting import until

MakeSshd = Callable[..., Sshd]
pytestmark = pytest.mark.usefixtures("quick_retries")


async def test_a_throttle_is_set_read_back_logged_and_undone(inventory: Path, nvml: FakeNvml) -> None:
    async with console(inventory) as c:
        await c.live()
        proposal = c.control.propose_throttle("n1", [(0, 0), (0, 1)], 150.0)
        ticket = await c.does(proposal)
        assert ticket.stage is Stage.DONE, ticket.reason
        assert nvml.limits() == {0: 550000, 1: 550000}
        await until(lambda: c.control.snapshot.gpus["power_limit_w"][1] == 550)
        assert c.control.leased_gpus == 2

        undo = c.control.propose_undo()
        assert undo is not None
        back = await c.does(undo)
        assert back.stage is Stage.DONE, back.reason
        assert nvml.limits() == {0: 700000, 1: 700000}
        assert next(t for t in c.control.tickets if t.id == ticket.id).stage is Stage.UNDONE
        assert c.control.leased_gpus == 0
        assert c.control.propose_undo() is None
        log = [(e["action"], e["stage"], e["id"] == ticket.id) for e in c.audit.read()]
        assert log == [
            ("throttle", "pending", True),
            ("throttle", "done", True),
            ("throttle", "pending", False),
            ("throttle", "done", False),
            ("throttle", "undone", True),
        ]


async def test_nothing_is_done_on_a_console_that_is_not_armed(inventory: Path, nvml: FakeNvml) -> None:
    async with console(inventory) as c:
        await c.live()
        proposal = c.control.propose_throttle("n1", [(0, 0)], 100.0)
        with pytest.raises(Refused, match="arm it first"):
            c.control.confirm(proposal)
        c.control.arming.arm()
        c.control.arming.disarm()
        with pytest.raises(Refused):
            c.control.confirm(proposal)
        assert (nvml.limits(), list(c.audit.read())) == ({}, [])


async def test_a_read_only_console_can_never_be_armed(inventory: Path) -> None:
    async with console(inventory, read_only=True) as c:
        assert "--read-only" in c.control.arming.arm()
        assert c.control.arming.left_s == 0


async def test_what_cannot_be_logged_is_not_done(inventory: Path, nvml: FakeNvml) -> None:
    async with console(inventory) as c:
        await c.live()
        c.audit.path.mkdir()
        c.control.arming.arm()
        with pytest.raises(AuditError, match="cannot be written"):
            c.control.confirm(c.control.propose_throttle("n1", [(0, 0)], 100.0))
        assert nvml.limits() == {}


async def test_a_throttle_is_all_nodes_or_none(tmp_path: Path, nvml_library: Path, make_sshd: MakeSshd) -> None:
    """The second node's driver refuses: the first gets its limit back, and both facts are said."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    willing, refusing = FakeNvml(nvml_library, tmp_path / "a/r"), FakeNvml(nvml_library, tmp_path / "b/r")
    willing.write(8)
    refusing.write(8, gpu0_limit_set="!4")
    servers = [make_sshd(willing.environment), make_sshd(refusing.environment)]
    async with console(write_inventory(tmp_path / "lab.yaml", servers)) as c:
        await c.live()
        ticket = await c.does(c.control.propose_throttle("both", [(0, 0), (1, 0)], 100.0))
        assert ticket.stage is Stage.FAILED
        assert ticket.reason.startswith("n2: ")
        assert "put back on 1 of 1 other nodes" in ticket.reason
        assert willing.limits() == {0: 700000}
        assert c.control.propose_undo() is None


async def test_the_job_is_found_followed_and_changed_through_ssh(inventory: Path, hooks: Path, tmp_path: Path) -> None:
    async with (
        training("train_light", hooks, steps=100000, step_s=0.02, save=tmp_path / "end") as _,
        console(inventory) as c,
    ):
        job = await c.job()
        assert (job.name, job.node, job.world_size, job.microbatches) == ("job", "n1", 2, (4, 4))
        ticket = await c.does(c.control.propose_microbatch(job, 2))
        assert ticket.stage is Stage.DONE, ticket.reason
        assert ticket.step is not None
        assert ticket.step > job.step
        assert c.stages(ticket) == [Stage.PENDING, Stage.ACKNOWLEDGED, Stage.DONE]
        changed = await c.job(lambda j: j.microbatch == 2)
        assert changed.microbatches == (8, 8)

        undo = c.control.propose_undo()
        assert undo is not None
        assert undo.action == Microbatch("job", 4, None)
        assert (await c.does(undo)).stage is Stage.DONE
        await c.job(lambda j: (j.microbatch, j.microbatches) == (4, (4, 4)))


async def hot_job(c: Console) -> JobStatus:
    """The light job, once its ranks' places and the 86 C of rank 0's GPU are known."""
    await c.live()
    await until(lambda: c.control.snapshot.gpus["temperature_c"][0] == 86)
    return await c.job(lambda j: j.step_s and len(j.ranks) == 2)


async def test_work_moves_off_a_hot_gpu_and_comes_back(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    """S8 live: rank 0's GPU is at 86 C of 89, rank 1's at 50 C."""
    nvml.write(8, gpu0_temperature=86, gpu1_temperature=50)
    async with training("train_light", hooks, steps=100000, step_s=0.02), console(inventory) as c:
        job = await hot_job(c)
        proposal = c.control.propose_rebalance(job)
        assert proposal.action == Rebalance("job", (3, 5)), proposal.refusal
        assert any("names no model profile" in note for note in proposal.notes)
        ticket = await c.does(proposal)
        assert ticket.stage is Stage.DONE, ticket.reason
        await c.job(lambda j: j.microbatches == (3, 5))
        undo = c.control.propose_undo()
        assert undo is not None
        assert (await c.does(undo)).stage is Stage.DONE
        await c.job(lambda j: j.microbatches == (4, 4))


async def test_undoing_a_microbatch_brings_an_uneven_split_back(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu0_temperature=86, gpu1_temperature=50)
    async with training("train_light", hooks, steps=100000, step_s=0.02), console(inventory) as c:
        job = await hot_job(c)
        await c.does(c.control.propose_rebalance(job))
        uneven = await c.job(lambda j: j.microbatches == (3, 5))
        await c.does(c.control.propose_microbatch(uneven, 8))
        await c.job(lambda j: j.microbatches == (2, 2))
        undo = c.control.propose_undo()
        assert undo is not None
        assert undo.action == Microbatch("job", 4, (3, 5))
        assert (await c.does(undo)).stage is Stage.DONE
        await c.job(lambda j: (j.microbatch, j.microbatches) == (4, (3, 5)))


async def test_a_job_that_dies_in_mid_command_is_unknown_and_alarmed(inventory: Path, hooks: Path) -> None:
    async with training("train_light", hooks, steps=1000, step_s=3) as trainer, console(inventory) as c:
        job = await c.job(lambda j: True)
        c.control.arming.arm()
        ticket = c.control.confirm(c.control.propose_microbatch(job, 2))
        os.killpg(trainer.process.pid, signal.SIGKILL)
        end = await c.ended(ticket)
        assert end.stage is Stage.UNKNOWN
        assert end.reason
        await until(lambda: any(a.key.startswith("job:") for a in c.control.alarms), what="an alarm for the job")
        assert [e["stage"] for e in c.audit.read()][-1] == "unknown"
        await c.live()  # the node goes on


async def test_a_job_that_ends_well_is_no_alarm(inventory: Path, hooks: Path) -> None:
    async with training("train_light", hooks, steps=100, step_s=0.02) as trainer, console(inventory) as c:
        await c.job(lambda j: True)
        await trainer.finished()
        await until(lambda: c.control.jobs.current and not c.control.jobs.current.attached)
        assert c.control.jobs.troubles() == {}


async def test_a_command_outlives_its_connection(
    tmp_path: Path, nvml: FakeNvml, make_sshd: MakeSshd, hooks: Path
) -> None:
    """sshd dies after the command went out; the console comes back, asks by id, and learns that it was done."""
    nvml.write(8)
    server = make_sshd({**nvml.environment, "RACKSIDE_HOOK_DIR": str(hooks)})
    inventory = write_inventory(tmp_path / "lab.yaml", [server])
    async with training("train_light", hooks, steps=1000, step_s=0.8), console(inventory) as c:
        job = await c.job(lambda j: True)
        c.control.arming.arm()
        ticket = c.control.confirm(c.control.propose_microbatch(job, 2))
        await until(lambda: Stage.ACKNOWLEDGED in c.stages(ticket), what="the hook's acknowledgement")
        server.stop()
        server.start()
        end = await c.ended(ticket)
        assert end.stage is Stage.DONE, end.reason
        assert end.before == Microbatch("job", 4, None)


async def test_two_jobs_each_take_their_own_commands(inventory: Path, hooks: Path) -> None:
    async with (
        training("train_light", hooks, name="one", steps=100000, step_s=0.02),
        training("train_light", hooks, name="two", steps=100000, step_s=0.02),
        console(inventory) as c,
    ):
        await until(lambda: sum(s.attached for s in c.control.jobs.statuses.values()) == 2, 60)
        first = await c.job()
        other = c.control.jobs.select_next()
        assert other is not None
        assert {first.name, other.name} == {"one", "two"}
        await c.job(lambda j: j.name == other.name and j.step_s)
        assert (await c.does(c.control.propose_microbatch(other, 2))).stage is Stage.DONE
        settings = {s.name: s.microbatch for s in c.control.jobs.statuses.values()}
        assert settings == {first.name: 4, other.name: 2}
        again = c.control.jobs.select_next()
        assert again is not None
        assert again.name == first.name


async def test_the_job_goes_on_when_the_console_goes(inventory: Path, hooks: Path, tmp_path: Path) -> None:
    async with training("train_light", hooks, steps=200, step_s=0.02, save=tmp_path / "end") as trainer:
        async with console(inventory) as c:
            job = await c.job()
            assert (await c.does(c.control.propose_microbatch(job, 2))).stage is Stage.DONE
        await trainer.finished()
    assert saved(tmp_path / "end", 0)["log"][-1] == [200, 2, [8, 8]]


async def test_what_the_panel_showed_is_what_is_sent(inventory: Path) -> None:
    """A proposal with a refusal, or for a node that is not in the inventory, never reaches a node."""
    async with console(inventory) as c:
        await c.live()
        c.control.arming.arm()
        proposal = c.control.propose_throttle("n1", [(0, 0)], -100.0)
        assert proposal.refusal
        with pytest.raises(Refused):
            c.control.confirm(proposal)
        lost: Proposal = replace(proposal, refusal="", action=Throttle({"elsewhere": {0: 500.0}}))
        ticket = await c.ended(c.control.confirm(lost))
        assert ticket.stage is Stage.FAILED
        assert "elsewhere" in ticket.reason


async def test_a_socket_that_does_not_open_is_said_and_no_alarm(
    tmp_path: Path, nvml: FakeNvml, make_sshd: MakeSshd, hooks: Path
) -> None:
    """A server that forwards no sockets: the operator sees why there is no job."""
    server = make_sshd({**nvml.environment, "RACKSIDE_HOOK_DIR": str(hooks)}, extra="DisableForwarding yes\n")
    async with (
        training("train_light", hooks, steps=100000, step_s=0.02),
        console(write_inventory(tmp_path / "lab.yaml", [server])) as c,
    ):
        await until(lambda: c.control.jobs.current, 60, "a status for the socket")
        job = c.control.jobs.current
        assert job is not None
        assert (job.name, job.attached) == ("job", False)
        assert "does not open" in job.reason
        assert c.control.jobs.troubles() == {}


async def test_what_was_predicted_is_measured_and_logged(
    inventory: Path, hooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "LEAST_S", 0.5)
    async with training("train_light", hooks, steps=100000, step_s=0.05), console(inventory) as c:
        await c.live()
        job = await c.job()
        ticket = await c.does(c.control.propose_microbatch(job, 2))
        await until(lambda: next(t for t in c.control.tickets if t.id == ticket.id).measured, 30, "a measured step")
        done = next(t for t in c.control.tickets if t.id == ticket.id)
        assert done.measured is not None
        assert done.measured.step_s == pytest.approx(0.05, abs=0.05)
        assert "; measured 0." in done.line
        entries = [e for e in c.control._audit.read() if e["id"] == ticket.id]
        assert entries[-1]["measured"]["step_s"] == done.measured.step_s


async def test_two_throttles_are_undone_one_after_the_other(inventory: Path, nvml: FakeNvml) -> None:
    async with console(inventory) as c:
        await c.live()
        for expected in (600_000, 500_000):
            await until(lambda: c.control.snapshot.gpus["power_limit_w"][0] == nvml.limits().get(0, 700_000) / 1000)
            assert (await c.does(c.control.propose_throttle("n1", [(0, 0)], 100.0))).stage is Stage.DONE
            assert nvml.limits() == {0: expected}
        for expected, held in ((600_000, 1), (700_000, 0)):
            undo = c.control.propose_undo()
            assert undo is not None
            assert (await c.does(undo)).stage is Stage.DONE
            assert nvml.limits() == {0: expected}
            await until(lambda held=held: c.control.leased_gpus == held)


async def test_the_job_of_another_operator_is_left_alone_unless_stolen_with_a_reason(
    inventory: Path, hooks: Path
) -> None:
    async with (
        training("train_light", hooks, steps=100000, step_s=0.02) as job,
        attached(job.socket, "ann@desk") as ann,
        console(inventory) as c,
    ):
        assert (await ann.does("first", "microbatch", microbatch=2)).state == "applied"
        status = await c.job(lambda j: j.holder == "ann@desk")
        proposal = c.control.propose_microbatch(status, 4)
        c.control.arming.arm()
        with pytest.raises(Refused, match=r"ann@desk holds job since .* Steal it with a reason"):
            c.control.confirm(proposal)
        ticket = c.control.confirm(proposal, steal="ann is asleep")
        await until(lambda: next(t for t in c.control.tickets if t.id == ticket.id).stage is Stage.DONE)
        await c.job(lambda j: j.holder == "ops@test" and j.held_because == "ann is asleep")
        assert [e["steal"] for e in c.audit.read()][-1] == "ann is asleep"
        assert "ops@test holds" in (await ann.does("second", "microbatch", microbatch=1)).reason
