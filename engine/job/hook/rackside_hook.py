"""rackside_hook: let an operator see a training job and change its microbatch or its split between ranks, live.

One file, standard library only, Python 3.8 or newer; copy it beside a training script
(`rackside hook > rackside_hook.py`) or install rackside. In the training loop of every data-parallel rank:

    hook = Hook(job="pretrain", microbatch=8, global_batch=256, rank=rank, world_size=world, store=store)
    settings = hook.step()                                  # settings of the step about to start
    while training:
        for microbatch in split(settings.samples(rank), settings.microbatch): ...
        hook.before_sync()                                  # if you can: right before gradients are synchronised
        settings = hook.step(loss=loss, tokens=tokens, step_time_s=seconds)

Rank 0 serves a Unix socket that only its own user (and root) can open; no network port. A change takes effect on all
ranks at the same step boundary; a pause is waited out by all ranks within `step`. The hook never raises into a running
job because of its own trouble: it warns once and the job goes on without it.

A change leaves training the same up to rounding if each step uses the fixed samples that `Settings.samples` hands
out, the loss is divided by the tokens of the whole global batch, randomness is keyed by sample, and each rank
synchronises its gradients once a step. FSDP wants the same number of microbatches on every rank: pass
`rebalance=False` there, and only microbatches that split evenly are taken. `Hook(job=...)` alone shows the job without
offering changes. Trainers that own their loop have adapters: `rackside hook --for NAME > rackside_trainers.py`.
"""

import atexit
import collections
import json
import math
import mmap
import os
import re
import selectors
import socket
import stat
import struct
import tempfile
import threading
import time
import warnings

PROTOCOL = 1
LINE_LIMIT = 1 << 16
BUFFER_LIMIT = 1 << 20
REMEMBERED = 1024

# A step synchronises gradients once: no rank can begin step n + 1 before rank 0 has given its own of step n. A record
# that rank 0 writes before it begins step n, or later but before it gives its gradients, is therefore in the store
# before any rank asks for it ahead of step n + 1. (A trainer that never waits for its GPU runs ahead of all this; its
# ranks warn when they see it.)
STEPS_AHEAD = 1
PAUSE_S, PAUSE_LOOK_S, PAUSE_GRACE_S = 300.0, 0.05, 5.0
# Written out, since a JSON encoder that seldom runs is cold and takes longer than all the rest.
STEP_LINE = (
    '{"event": "step", "step": %d, "time": %r, "loss": %s, "tokens": %s, "step_time_s": %s, '
    '"settings": {"step": %d, %s}\n'
)
# What ends within TOGETHER_S of what was told last is told with the next, or by the serving thread within HELD_S.
TOGETHER_S, HELD_S = 0.5, 1.0
PLAIN = (float, int, type(None))
# Read in place of a flag where there is none: no count of commands equals it.
NO_FLAG = (-1,)
# An operator who is gone for so long, or has sent nothing for so long, no longer holds the job.
GONE_S, IDLE_S = 60.0, 900.0


class Settings(collections.namedtuple("Settings", "step microbatch microbatches offsets")):
    """What a step runs with: `microbatch` samples in a forward pass, `microbatches[r]` of them on rank r."""

    __slots__ = ()

    def samples(self, rank):
        """The sample indices (0 .. global batch - 1) that `rank` takes in this step: contiguous, disjoint, complete."""
        first = self.offsets[rank] * self.microbatch
        return range(first, first + self.microbatches[rank] * self.microbatch)

    def as_dict(self):
        return {"step": self.step, "microbatch": self.microbatch, "microbatches": list(self.microbatches)}


def make_settings(step, microbatch, microbatches):
    """Settings with the sample offsets of each rank worked out."""
    offsets, total = [], 0
    for count in microbatches:
        offsets.append(total)
        total += count
    return Settings(step, microbatch, tuple(microbatches), tuple(offsets))


def even_split(total, ranks):
    """`total` microbatches over `ranks`, as even as whole numbers allow; the first ranks take the rest."""
    least, rest = divmod(total, ranks)
    return [least + (rank < rest) for rank in range(ranks)]


def split_for(microbatch, before, global_batch):
    """The split with another microbatch: each rank keeps its samples where they divide into microbatches on every rank,
    else all ranks take the even split."""
    samples = [count * before.microbatch for count in before.microbatches]
    if all(share % microbatch == 0 for share in samples):
        return [share // microbatch for share in samples]
    return even_split(global_batch // microbatch, len(samples))


def fitting_microbatches(global_batch, ranks, most=None, evenly=False):
    """Microbatches that divide the global batch and leave at least one for each rank, or `evenly` as many."""
    top = min(global_batch // ranks, most or global_batch)
    return [m for m in range(1, top + 1) if global_batch % (m * ranks if evenly else m) == 0]


class Refused(Exception):
    """A command that the hook does not carry out; the text is a sentence for the operator."""


def whole(value, name):
    """`value` as a whole number, or Refused; true and 3.0 are not whole numbers here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused("%s must be a whole number, not %r." % (name, value))
    return value


class Hook(object):
    """One for each data-parallel rank. `store` is the process group's key-value store (set, get, add).

    `fits`: the only microbatches that the trainer can run, where its loader narrows them. `follows`: this is a further
    process of the data-parallel rank (of tensor, pipeline or context parallelism): it keeps to what all agreed on, and
    neither serves nor writes.
    """

    def __init__(
        self,
        job,
        microbatch=1,
        global_batch=None,
        rank=0,
        world_size=1,
        store=None,
        directory=None,
        tokens_per_sample=None,
        framework="pytorch",
        plan=None,
        device=None,
        host=None,
        max_microbatch=None,
        rebalance=True,
        max_pause_s=PAUSE_S,
        fits=None,
        follows=False,
    ):
        if not (0 <= rank < world_size):
            raise ValueError("rank %d is not one of the %d ranks 0 to %d." % (rank, world_size, world_size - 1))
        if world_size > 1 and store is None:
            raise ValueError("%d ranks need the process group's store to change at the same step." % world_size)
        changeable = global_batch is not None
        global_batch = global_batch or microbatch * world_size
        able = fitting_microbatches(global_batch, world_size, max_microbatch, evenly=not rebalance)
        fits = [m for m in able if fits is None or m in fits]
        if microbatch not in fits:
            raise ValueError(
                "microbatch %d does not fit a global batch of %d on %d ranks; %s do."
                % (microbatch, global_batch, world_size, ", ".join(map(str, fits)) or "none")
            )
        self.job, self.rank, self.world_size, self.fits = job, rank, world_size, fits
        self.global_batch, self.max_microbatch, self.max_pause_s = global_batch, max_microbatch, max_pause_s
        self._store, self._prefix = store, "rackside/%s/" % job
        self.settings = make_settings(0, microbatch, even_split(global_batch // microbatch, world_size))
        self._seen, self._written, self._pending, self._trouble = 0, 0, [], ""
        self._flag, self._raised = NO_FLAG, None
        self._pauses, self._pause_until, self._pause_ids, self._closed = 0, None, [], False
        self._pid, self._ranks, self._server = os.getpid(), None, None
        place = {"rank": rank, "host": host or socket.gethostname(), "pid": os.getpid(), "device": device}
        self._leads = rank == 0 and not follows
        if not follows:
            self._register(place)
        if self._leads:
            self._facts = {
                "job": job,
                "pid": os.getpid(),
                "host": place["host"],
                "framework": framework,
                "world_size": world_size,
                "global_batch": global_batch,
                "tokens_per_sample": tokens_per_sample,
                "plan": plan,
                "can": _can(len(fits) > 1, rebalance, max_pause_s) if changeable else [],
                "max_pause_s": max_pause_s,
            }
            self._serve(directory)
        atexit.register(self.close)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def samples(self, rank=None):
        """The sample indices that a rank (this one by default) takes in the coming step."""
        return self.settings.samples(self.rank if rank is None else rank)

    def step(self, loss=None, tokens=None, step_time_s=None):
        """Once a step, at its boundary: report what ended, return the Settings of the step that begins.

        The first call begins step 1. With nobody attached this takes a few microseconds; on other machines than rank
        0's, one round trip to the store.
        """
        ended = self.settings
        number, microbatch, microbatches, offsets = ended
        number += 1
        server = self._server
        if server is not None and server.attached:
            try:
                self._report(server, ended, loss, tokens, step_time_s)
            except Exception as error:  # never into the job
                self._give_up("reporting failed: %r" % (error,))
        try:
            if server is not None and server.commands:
                self._accept(server, number + (STEPS_AHEAD if self._store is not None else 0))
            if self._store is not None:
                self._fetch(number)
        except Exception as error:
            self._give_up("the process group's store failed: %r" % (error,))
        if self._pending and self._pending[0]["step"] <= number:
            self._apply(number)
        else:
            self.settings = tuple.__new__(Settings, (number, microbatch, microbatches, offsets))
        if self._pause_until is not None:
            try:
                self._wait_out(number)
            except Exception as error:
                self._give_up("a pause was cut short: %r" % (error,))
        return self.settings

    def before_sync(self):
        """Optional, on every rank, right before this step's gradients are synchronised: a command that has arrived by
        then takes effect at the very next step, instead of one later. Costs nothing when none has."""
        server = self._server
        if server is not None and server.commands and self._store is not None:
            try:
                self._accept(server, self.settings.step + 1)
            except Exception as error:
                self._give_up("the process group's store failed: %r" % (error,))

    def close(self):
        """Stop serving, end a pause and remove the socket. Safe to call twice, and in a forked child."""
        self._closed = True
        if self._server is not None and os.getpid() == self._pid:
            self._server.close()
            self._server = None
        if self._raised is not None:
            self._raised.close()

    def _serve(self, directory):
        try:
            self._server = Server(directory, self.job, self._greeting)
            self._server.start()
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._server.forget)
        except (OSError, UnsafeDirectory) as error:
            self._server = None
            warnings.warn("rackside: no console can reach this job: %s. The job goes on." % (error,), RuntimeWarning, 3)

    def _give_up(self, why):
        if not self._trouble:
            self._trouble = why
            warnings.warn("rackside: %s. The job goes on; live changes may be off." % why, RuntimeWarning, 3)

    def _register(self, place):
        """Tell rank 0 where this rank runs; counted, because a store's `get` may block on a key that is not there."""
        if self._store is None:
            self._ranks = [place]
            return
        try:
            self._store.set(self._prefix + "rank/%d" % self.rank, json.dumps(place))
            self._store.add(self._prefix + "ranks", 1)
            if self._leads:
                self._raised = made_flag()
            if self._raised is not None:
                self._store.set(self._prefix + "flag", json.dumps(self._raised.place))
                self._store.add(self._prefix + "flags", 1)
        except Exception as error:
            self._give_up("the process group's store failed: %r" % (error,))

    def _greeting(self):
        found = dict(self._facts, rackside_hook=PROTOCOL, step=self.settings.step, ranks=self._ranks)
        found["settings"] = self.settings.as_dict()
        if self._server is not None:
            found.update(holder=self._server.holder, paused_until=self._server.paused_until)
        return found

    def _report(self, server, ended, loss, tokens, step_time_s):
        if self._ranks is None and int(self._store.add(self._prefix + "ranks", 0)) >= self.world_size:
            self._ranks = [json.loads(self._text(self._prefix + "rank/%d" % r)) for r in range(self.world_size)]
            server.tell({"event": "ranks", "ranks": self._ranks})
        if ended.step:
            # What is no plain number, such as a tensor, may be another one by the time that it is sent.
            if loss.__class__ not in PLAIN:
                loss = finite(loss)
            if tokens.__class__ not in PLAIN:
                tokens = finite(tokens)
            if step_time_s.__class__ not in PLAIN:
                step_time_s = finite(step_time_s)
            server.tell_step(ended, loss, tokens, step_time_s)

    def _text(self, key):
        value = self._store.get(key)
        return value.decode() if isinstance(value, bytes) else value

    def _accept(self, server, at):
        """Rank 0: give each waiting command its step, `at` or later, and pass it to all ranks."""
        while server.commands:
            command = server.commands.popleft()
            record = dict(command, step=max([at] + [p["step"] for p in self._pending]))
            if self._store is None:
                self._pending.append(record)
            else:
                # The record first, the counter after it: who sees the counter can read the record. The flag before
                # both: who sees that looks at the counter in each step until the two agree.
                self._written += 1
                if self._raised is not None:
                    self._raised.numbers[0] = self._written
                self._store.set(self._prefix + "command/%d" % self._written, json.dumps(record))
                self._store.add(self._prefix + "commands", 1)
            server.state(command["id"], {"state": "scheduled", "step": record["step"]})

    def _fetch(self, number):
        """All ranks: read the counter (no collective) and the records behind it, where the flag does not say that none
        is new. Rank 0 has told of its flag, if it has one, before it gave its gradients of step 1."""
        if number == 2 and int(self._store.add(self._prefix + "flags", 0)):
            self._flag = found_flag(json.loads(self._text(self._prefix + "flag")))
        if self._flag[0] == self._seen:
            return
        count = int(self._store.add(self._prefix + "commands", 0))
        while self._seen < count:
            self._seen += 1
            self._pending.append(json.loads(self._text(self._prefix + "command/%d" % self._seen)))

    def _apply(self, number):
        """Settings of step `number`, with every command that is due; all ranks come to the same result."""
        now = self.settings
        now = Settings(number, now.microbatch, now.microbatches, now.offsets)
        while self._pending and self._pending[0]["step"] <= number:
            command, before = self._pending.pop(0), now
            if command["step"] < number:
                self._give_up("step %d began before rank 0 had ended the last: wait for the GPU once a step" % number)
            try:
                if command["do"] == "pause":
                    self._pause_ids.append(command["id"])
                    self._pause_until = time.monotonic() + self._seconds(command)
                else:
                    now = self._changed(now, command)
                outcome = {"state": "applied", "step": number, "before": before.as_dict(), "settings": now.as_dict()}
            except Refused as error:
                outcome = {"state": "rejected", "reason": str(error)}
            if self._server is not None:
                self._server.state(command["id"], outcome)
        self.settings = now
        if self._pause_ids and self._pause_until is None:
            self._over(number)  # each was refused

    def _over(self, number):
        """No pause is in force any more, nor does one of those that were due wait."""
        ids, self._pause_ids = self._pause_ids, []
        if self._server is not None:
            self._server.resumed(number, ids)

    def _seconds(self, command):
        seconds = finite(command.get("seconds"))
        if seconds is None or not 0 < seconds <= self.max_pause_s:
            raise Refused("A pause of this job is at most %g s, and longer than 0." % self.max_pause_s)
        return seconds

    def _wait_out(self, number):
        """Wait until the pause is over, on every rank at the same boundary: no collective is under way meanwhile.

        Rank 0 ends it, when its time is up or somebody resumes the job; the others look for its word in the store, and
        go on by themselves a little later should it be silent.
        """
        server, until, key = self._server, self._pause_until, self._prefix + "resumed"
        self._pause_until = None
        self._pauses += 1
        if self._leads:
            if server is not None:
                server.paused(number, time.time() + until - time.monotonic())
            while time.monotonic() < until and not self._closed and not (server is not None and server.resuming):
                time.sleep(PAUSE_LOOK_S)
            try:
                if self._store is not None:
                    self._store.add(key, 1)
            finally:
                self._over(number)
            return
        self._pause_ids = []
        until += PAUSE_GRACE_S
        while time.monotonic() < until and not self._closed and int(self._store.add(key, 0)) < self._pauses:
            time.sleep(PAUSE_LOOK_S)

    def _changed(self, now, command):
        total = self.global_batch
        if command["do"] == "microbatch":
            m = whole(command.get("microbatch"), "microbatch")
            if m not in self.fits:
                raise Refused(
                    "Microbatch %d does not fit the global batch of %d on %d ranks; %s would."
                    % (m, total, self.world_size, ", ".join(map(str, self.fits)))
                )
            if command.get("microbatches") is None:
                return make_settings(now.step, m, split_for(m, now, total))
        else:
            m = now.microbatch
        counts = command.get("microbatches")
        if not isinstance(counts, list) or len(counts) != self.world_size:
            raise Refused("The split must name one number for each of the %d ranks." % self.world_size)
        counts = [whole(c, "each rank's count") for c in counts]
        want = total // m
        if min(counts) < 0 or sum(counts) != want:
            raise Refused("The split must add up to %d microbatches, none below 0; not to %d." % (want, sum(counts)))
        return make_settings(now.step, m, counts)


def _can(resize, rebalance, max_pause_s):
    return ["microbatch"] * bool(resize) + ["rebalance"] * bool(rebalance) + ["pause", "resume"] * bool(max_pause_s)


def finite(value):
    """A float that JSON can carry, or None."""
    try:
        value = float(value)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def number_text(value):
    """A finite float as JSON has it, or null."""
    value = finite(value)
    return "null" if value is None else repr(value)


class Flag(object):
    """How many commands rank 0 has written, in memory that it shares with the ranks on its machine: these look there at
    no cost, instead of in the store. `place` leads to it; the mark tells it from what has that name elsewhere."""

    def __init__(self):
        self._file = os.memfd_create("rackside")
        os.ftruncate(self._file, 16)
        self.numbers = memoryview(mmap.mmap(self._file, 16)).cast("q")
        self.numbers[1] = int.from_bytes(os.urandom(7), "little")
        self.place = [machine(), "/proc/%d/fd/%d" % (os.getpid(), self._file), self.numbers[1]]

    def close(self):
        if self._file is not None:
            os.close(self._file)
            self._file = None


def machine():
    """This boot of this machine's kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def made_flag():
    """Rank 0's, or None where the system has no such memory."""
    try:
        return Flag()
    except (OSError, AttributeError):
        return None


def found_flag(place):
    """The numbers of rank 0's flag, or NO_FLAG on another machine or in a container that does not see rank 0."""
    where, path, mark = place
    try:
        if where == machine() and stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                numbers = memoryview(mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)).cast("q")
            if numbers[1] == mark:
                return numbers
    except (OSError, ValueError):
        pass
    return NO_FLAG


class UnsafeDirectory(Exception):
    """The socket's directory is not ours alone."""


def socket_directory(directory=None):
    """Where sockets live: `directory`, $RACKSIDE_HOOK_DIR, $XDG_RUNTIME_DIR/rackside or /tmp/rackside-<uid>.

    Made with mode 0700; UnsafeDirectory when somebody else owns it or may write there.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = directory or os.environ.get("RACKSIDE_HOOK_DIR")
    path = path or (os.path.join(runtime, "rackside") if runtime else "/tmp/rackside-%d" % os.getuid())
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeDirectory("%s is not a directory" % path)
    if found.st_uid != os.getuid():
        raise UnsafeDirectory("%s belongs to another user (uid %d)" % (path, found.st_uid))
    if found.st_mode & 0o077:
        raise UnsafeDirectory("%s is open to others (mode %03o); chmod 700 it" % (path, found.st_mode & 0o777))
    return path


class Client(object):
    """One attached console: bytes read and not yet parsed, bytes to send."""

    def __init__(self, connection):
        self.connection, self.read, self.write = connection, bytearray(), bytearray()
        self.greeted, self.closing, self.operator = False, False, ""
        self.wanted = selectors.EVENT_READ


class Server(threading.Thread):
    """Serves the socket on a thread of its own. The training thread appends to deques and wakes it; what it tells after
    every step it sends itself where that needs no waiting, since waking another thread costs several times as much."""

    def __init__(self, directory, job, greeting):
        threading.Thread.__init__(self, name="rackside-hook", daemon=True)
        self.commands = collections.deque()
        self.attached = 0
        self._greeting = greeting
        self._told_at, self._split = 0.0, None
        self._outbox = collections.deque()
        self._states = collections.OrderedDict()
        self._lock = threading.Lock()
        # Held while clients, what they wait to be sent and the outbox are worked on; the training thread never waits.
        self._sending = threading.Lock()
        self._clients = {}
        self._running = True
        self.holder, self._heard = None, 0.0
        self.paused_until, self._pausing, self._resumers = None, set(), []
        self._listener, self.path = self._listen(socket_directory(directory), job)
        self._inode = os.stat(self.path).st_ino
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    @staticmethod
    def _listen(directory, job):
        name = re.sub(r"[^A-Za-z0-9._-]", "_", job).lstrip(".")[:48] or "job"
        path = os.path.join(directory, name + ".sock")
        if os.path.exists(path):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            probe.settimeout(1)
            try:
                probe.connect(path)
                path = os.path.join(directory, "%s-%d.sock" % (name, os.getpid()))  # a living job has the name
            except OSError:
                os.unlink(path)  # left by a dead one
            finally:
                probe.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Bound under a private name, given its mode, then moved into place: never seen with wider permissions.
        private = tempfile.mktemp(prefix=".", suffix=".new", dir=directory)
        listener.bind(private)
        os.chmod(private, 0o600)
        listener.listen(16)
        listener.setblocking(False)
        os.rename(private, path)
        return listener, path

    # Called by the training thread.

    def tell(self, message):
        """Send to every attached client."""
        self._outbox.append((json.dumps(message).encode() + b"\n", False))
        self._wake()

    def tell_step(self, *ended):
        """Tell every attached client of a step, after all that was told before; it is left out where one is slow.

        Steps that come in quick succession go together: what costs is to write them down with cold caches, and to wake
        a client, not to tell it more.
        """
        now = time.time()
        self._outbox.append(((now, ended), True))
        if 0 <= now - self._told_at < TOGETHER_S:
            return
        self._told_at = now
        if not self._sending.acquire(False):
            self._wake()
            return
        try:
            self._hand_out()
            for client in list(self._clients.values()):
                if client.write and not self._sent(client):
                    self._wake()
        finally:
            self._sending.release()

    def state(self, command_id, state):
        """Record where a command stands, and tell everybody."""
        with self._lock:
            known = self._states.setdefault(command_id, {})
            known.update(state)
            known["id"] = command_id
            while len(self._states) > REMEMBERED:
                self._states.popitem(last=False)
            message = dict(known)
        self.tell(message)

    def paused(self, step, until):
        """The job waits from now on, at most until that unix second."""
        self.paused_until = until
        self.tell({"event": "pause", "step": step, "until": until})

    @property
    def resuming(self):
        return bool(self._resumers)

    def resumed(self, step, pauses):
        """The job goes on after these pauses; whoever asked for it is told. One lock with `_command`: a resume finds
        the pause, or comes too late, and never waits for the next one."""
        with self._lock:
            self._pausing.difference_update(pauses)
            resumers, self._resumers = self._resumers, []
        self.paused_until = None
        self.tell({"event": "pause", "step": step, "until": None})
        for command_id in resumers:
            self.state(command_id, {"state": "applied", "step": step})

    def close(self):
        """Say goodbye, stop the thread and remove the socket if it still is ours."""
        self._outbox.append((b'{"event": "closing"}\n', False))
        self._running = False
        self._wake()
        if threading.current_thread() is not self:
            self.join(2)
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except OSError:
            pass

    def forget(self):
        """In a forked child, which has no thread to serve them: let go of the listener and the consoles."""
        self.attached = 0
        self._listener.close()
        for client in self._clients.values():
            client.connection.close()

    def _wake(self):
        try:
            os.write(self._wake_write, b".")
        except (BlockingIOError, OSError):
            pass  # a full pipe wakes the thread just as well

    # The thread's own.

    def run(self):
        while self._running:
            ready = self._selector.select(HELD_S if self.attached else None)
            with self._sending:
                for key, mask in ready:
                    if key.fileobj is self._listener:
                        self._welcome()
                    elif key.data is None:
                        self._drain()
                    else:
                        self._serve_client(key.data, mask)
                self._send_outbox()
        with self._sending:
            self._send_outbox()
            for client in list(self._clients.values()):
                self._flush(client)
                self._drop(client)
        self._listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _drain(self):
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _welcome(self):
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if not same_user(connection):
            connection.close()
            return
        client = Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve_client(self, client, mask):
        if mask & selectors.EVENT_WRITE:
            self._flush(client)
        if client.connection.fileno() < 0 or not mask & selectors.EVENT_READ:
            return
        try:
            data = client.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.read += data
        while b"\n" in client.read and not client.closing:
            line, _, rest = client.read.partition(b"\n")
            client.read = bytearray(rest)
            if len(line) > LINE_LIMIT:
                break
            self._line(client, bytes(line))
        else:
            line = client.read
        if len(line) > LINE_LIMIT and not client.closing:
            self._refuse(client, "a line is longer than %d bytes" % LINE_LIMIT)
        self._flush(client)

    def _line(self, client, line):
        try:
            message = json.loads(line.decode("utf-8"))
            if not isinstance(message, dict):
                raise ValueError
        except (ValueError, RecursionError):
            self._refuse(client, "a line is not a JSON object")
            return
        if not client.greeted:
            if message.get("hello") != PROTOCOL:
                self._refuse(client, "this hook speaks protocol %d, not %r" % (PROTOCOL, message.get("hello")))
                return
            self._hand_out()  # what was told before it came is not for it
            client.greeted, client.operator = True, str(message.get("operator", ""))[:120]
            self.attached += 1
            self._queue(client, self._greeting())
        elif "ask" in message:
            with self._lock:
                known = self._states.get(str(message["ask"]), {"state": "unknown", "id": message["ask"]})
                known = dict(known)
            self._queue(client, known)
        elif "do" in message:
            self._command(client, message)
        else:
            self._refuse(client, "a line says neither 'do' nor 'ask'")

    def _command(self, client, message):
        command_id = message.get("id")
        if not isinstance(command_id, str) or not 0 < len(command_id) <= 128:
            self._refuse(client, "a command needs an 'id', a text of 1 to 128 characters")
            return
        can = self._greeting()["can"]
        wants = [message["do"]] + ["rebalance"] * (message.get("microbatches") is not None)
        lacks = [do for do in wants if do not in can]
        if lacks:
            state = {"id": command_id, "state": "rejected", "reason": "This job does not offer %r." % (lacks[0],)}
            self._queue(client, state)
            return
        refusal = ""
        with self._lock:
            known = self._states.get(command_id)
            if known is None:
                refusal = self._held(client, message)
                state = {"id": command_id, "state": "rejected" if refusal else "accepted", "operator": client.operator}
                if refusal:
                    state["reason"] = refusal
                elif message["do"] == "resume":
                    self._resumers.append(command_id)
                elif message["do"] == "pause":
                    self._pausing.add(command_id)
                self._states[command_id] = state
        if known is not None or refusal:
            self._queue(client, dict(known or state))  # a repeated id is answered, never applied twice
        elif message["do"] != "resume":
            self.commands.append(message)

    def _held(self, client, message):
        """Why this operator may not command the job now, or nothing: then the job is this operator's from here on.

        One operator at a time: whoever commands holds the job until gone or idle for long. Another may steal it with a
        reason, which everybody is told.
        """
        now, who, held = time.time(), client.operator, self.holder
        if message["do"] == "resume" and not self._pausing:
            return "The job is not paused."
        if held is not None and held["operator"] != who:
            there = any(c.greeted and c.operator == held["operator"] for c in self._clients.values())
            reason = str(message.get("steal") or "")[:200]
            if now - self._heard < (IDLE_S if there else GONE_S) and not reason:
                since = time.strftime("%H:%M:%S", time.localtime(held["since"]))
                return "%s holds this job since %s; steal it with a reason to act." % (held["operator"], since)
            held = None
        self._heard = now
        if held is None:
            self.holder = {"operator": who, "since": now, "reason": str(message.get("steal") or "")[:200]}
            self.tell({"event": "holder", "holder": self.holder})
        return ""

    def _refuse(self, client, why):
        self._queue(client, {"error": "rackside_hook closes this connection: %s." % why, "rackside_hook": PROTOCOL})
        client.closing = True

    def _hand_out(self):
        while self._outbox:
            line, droppable = self._outbox.popleft()
            if droppable:
                line = self._step_line(*line)
            for client in list(self._clients.values()):
                if client.greeted and not (droppable and len(client.write) > LINE_LIMIT):
                    client.write += line

    def _step_line(self, at, ended):
        settings, loss, tokens, step_time_s = ended
        if self._split is None or self._split[0] != settings[1:]:
            split = json.dumps({"microbatch": settings.microbatch, "microbatches": settings.microbatches})
            self._split = (settings[1:], split[1:])
        numbers = (settings.step, at, number_text(loss), number_text(tokens), number_text(step_time_s))
        return (STEP_LINE % (*numbers, settings.step, self._split[1])).encode()

    def _send_outbox(self):
        self._hand_out()
        for client in list(self._clients.values()):
            if client.write:
                self._flush(client)

    def _queue(self, client, message):
        client.write += json.dumps(message).encode() + b"\n"

    @staticmethod
    def _sent(client):
        """Send what waits for a client, as far as it takes it: whether that was all. OSError is left to `_flush`."""
        try:
            while client.write:
                del client.write[: client.connection.send(client.write)]
        except OSError:
            pass
        return not client.write

    def _flush(self, client):
        try:
            while client.write:
                del client.write[: client.connection.send(client.write)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if len(client.write) > BUFFER_LIMIT or (client.closing and not client.write):
            self._drop(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.write else 0)
        if wanted != client.wanted:
            client.wanted = wanted
            try:
                self._selector.modify(client.connection, wanted, client)
            except (KeyError, ValueError):
                pass

    def _drop(self, client):
        number = client.connection.fileno()
        if number < 0:
            return
        self._clients.pop(number, None)
        if client.greeted:
            self.attached -= 1
        try:
            self._selector.unregister(client.connection)
        except (KeyError, ValueError):
            pass
        client.connection.close()


def same_user(connection):
    """Whether the peer is our own user or root; where the system cannot tell, the directory's mode has decided."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)
