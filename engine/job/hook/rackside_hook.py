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
import datetime
import json
import math
import mmap
import os
import queue
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
# If all processes have not told by then how they hear of commands, rank 0 announces none.
SETTLED = 64
# How long all machines may take to say that they have heard of a command, and how often rank 0 looks.
HEARD_S, HEARD_LOOK_S = 60.0, 0.002
# They wait for the next for as long as a store's milliseconds can count; this word ends it.
WAIT_DAYS, NO_MORE = 20, -2
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
    """One for each data-parallel rank. `store` is the process group's key-value store (set, get, add); two threads must
    be able to use it, as they are with PyTorch's.

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
        self.job, self.rank, self.world_size, self.fits, self._trouble = job, rank, world_size, fits, ""
        self.global_batch, self.max_microbatch, self.max_pause_s = global_batch, max_microbatch, max_pause_s
        self._store, self._prefix = store, self._fresh_prefix(job, store, "%d%s" % (rank, "f" * follows))
        self.settings = make_settings(0, microbatch, even_split(global_batch // microbatch, world_size))
        self._seen, self._written, self._pending = 0, 0, []
        self._flag, self._raised, self._watcher, self._herald = NO_FLAG, None, None, None
        self._settling = store is not None
        self._pauses, self._pause_until, self._pause_ids, self._closed = 0, None, [], False
        self._pid, self._ranks, self._server = os.getpid(), None, None
        place = {"rank": rank, "host": host or socket.gethostname(), "pid": os.getpid(), "device": device}
        self._leads = rank == 0 and not follows
        self._register(place, follows)
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

        The first call begins step 1. With nobody attached this takes a few microseconds.
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
        for thread in (self._herald, self._watcher):
            if thread is not None:
                thread.close()
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

    def _fresh_prefix(self, job, store, process):
        """Where this hook's keys are: none that an earlier hook of the job has left in the store, as a trainer that is
        started twice in one process does. All processes make equally many."""
        made = 1
        if store is not None:
            try:
                made = int(store.add("rackside/%s/made/%s/%d/%s" % (job, machine(), os.getpid(), process), 1))
            except Exception as error:
                self._give_up("the process group's store failed: %r" % (error,))
        return "rackside/%s/%d/" % (job, made)

    def _register(self, place, follows):
        """Tell rank 0 where this rank runs; counted, because a store's `get` may block on a key that is not there."""
        if self._store is None:
            self._ranks = [place]
            return
        try:
            self._store.add(self._prefix + "processes", 1)
            if self._leads:
                self._raised = made_flag()
                self._tell_flag(self._prefix)
            if not follows:
                self._store.set(self._prefix + "rank/%d" % self.rank, json.dumps(place))
                self._store.add(self._prefix + "ranks", 1)
        except Exception as error:
            self._give_up("the process group's store failed: %r" % (error,))

    def _tell_flag(self, prefix):
        if self._raised is not None:
            self._store.set(prefix + "flag", json.dumps(self._raised.place))
            self._store.add(prefix + "flags", 1)

    def _told_flag(self, prefix):
        told = int(self._store.add(prefix + "flags", 0))
        return found_flag(json.loads(self._text(prefix + "flag"))) if told else NO_FLAG

    def _settle(self, number):
        """In the first steps: find out where this process sees that there are commands. That is rank 0's flag; on
        another machine the flag of its first process there, on which a thread watches the store; a process that sees
        none of these watches for itself. Whoever finds nothing in time asks the store in each step, which is always
        right. Rank 0 then sees whether some watch, to whom commands must be announced.
        """
        here = "%smachine/%s/" % (self._prefix, machine())
        if number == 2:
            self._flag = self._told_flag(self._prefix)
            if self._flag is NO_FLAG and int(self._store.add(here + "processes", 1)) == 1:
                self._watch(here)
        elif number == 3:
            if self._flag is NO_FLAG:
                self._flag = self._told_flag(here)
            if self._flag is NO_FLAG:
                self._watch("%sprocess/%d/" % (here, os.getpid()))
            self._store.add(self._prefix + "settled", 1)
            self._settling = self._server is not None
        elif number > 3:
            count = lambda key: int(self._store.add(self._prefix + key, 0))  # noqa: E731
            complete = count("ranks") >= self.world_size and count("settled") >= count("processes")
            self._settling = not complete and number < SETTLED
            if complete and count("watching"):
                self._herald = Herald(self._store, self._prefix, count("watching"), self._server)

    def _watch(self, prefix):
        try:
            waiting = self._store.clone()
            waiting.set_timeout(datetime.timedelta(days=WAIT_DAYS))
        except Exception:  # an older PyTorch gives no second connection: this process looks in each step
            return
        self._raised = made_flag()
        numbers = [0] if self._raised is None else self._raised.numbers
        numbers[0] = NO_FLAG[0]
        self._watcher = Watcher(self._store, waiting, self._prefix, numbers)
        self._watcher.start()
        self._flag = numbers
        self._tell_flag(prefix)

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
        is new."""
        if self._settling:
            self._settle(number)
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
    """This boot of this machine's kernel; the host's name where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def made_flag():
    """Rank 0's, or None where the system has no such memory."""
    try:
        return Flag()
    except (OSError, AttributeError):
        return None


def found_flag(place):
    """The numbers of rank 0's flag, or NO_FLAG on another machine or in a container that does not see rank 0."""
    try:
        where, path, mark = place
        if where == machine() and stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                numbers = memoryview(mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)).cast("q")
            if numbers[1] == mark:
                return numbers
    except (OSError, ValueError):
        pass
    return NO_FLAG


class Watcher(threading.Thread):
    """On a machine that does not share memory with rank 0: waits, on a connection of its own, for the store to hold
    the next word of rank 0, that a command is coming; raises the flag of this machine and says that it did. A process
    that has passed its boundary by then meets the command at a later one: rank 0 writes it down only after all have
    said so, and before it gives its gradients."""

    def __init__(self, store, waiting, prefix, numbers):
        threading.Thread.__init__(self, name="rackside-watch", daemon=True)
        self._store, self._waiting, self._prefix, self._numbers = store, waiting, prefix, numbers
        self._words = "%sword/%d/" % (prefix, int(store.add(prefix + "watching", 1)))
        self._read = 0

    def run(self):
        try:
            while True:
                coming = int(self._waiting.get("%s%d" % (self._words, self._read + 1)))
                self._read += 1
                if coming == NO_MORE:
                    return
                self._numbers[0] = coming
                self._waiting.add(self._prefix + "heard/%d" % coming, 1)
        except Exception:  # whatever a store raises
            self._deaf()

    def _deaf(self):
        """From now on this machine looks in each step, and nobody waits for it to hear."""
        self._numbers[0] = NO_FLAG[0]
        try:
            self._store.add(self._prefix + "deaf", 1)
        except Exception:
            pass  # the training thread meets it too, and warns of it

    def close(self):
        """Wake it with a word that it is to end; again, where rank 0 has written over that."""
        tries = 20
        while self.is_alive() and tries:
            try:
                self._store.set("%s%d" % (self._words, self._read + 1), str(NO_MORE))
            except Exception:
                return  # the store has gone, and the thread with it
            self.join(0.1)
            tries -= 1
            if not self.is_alive():
                self._deaf()


class Herald(threading.Thread):
    """Rank 0's, where machines watch: announces each command to them, and hands it to the training thread once all have
    heard. `machines` is how many there are."""

    def __init__(self, store, prefix, machines, server):
        threading.Thread.__init__(self, name="rackside-herald", daemon=True)
        self._store, self._prefix, self._machines, self._server = store, prefix, machines, server
        self._waiting, self._words, self._running = queue.Queue(), 0, True
        server.herald = self
        # Read after the line above: what the server has counted by now is written down unannounced, all later is not.
        self.announce(server.counted, None)
        self.start()

    def announce(self, number, command):
        """The server's `number`-th command has come; None for all until then, which are on their way."""
        self._waiting.put((number, command))

    def run(self):
        while self._running:
            number, command = self._waiting.get()
            try:
                # Read before the word: who is deaf by now does not hear it, and is not counted twice.
                machines = self._machines - int(self._store.add(self._prefix + "deaf", 0))
                self._say(number)
                why = self._unheard(number, machines) if command is not None else ""
            except Exception as error:
                why = "The process group's store failed: %r" % (error,)
            if command is not None and why:
                self._server.refuse(command, why)  # never written: from now on all look in each step
            elif command is not None:
                self._server.commands.append(command)

    def _say(self, number):
        self._words += 1
        for machine in range(1, self._machines + 1):
            self._store.set("%sword/%d/%d" % (self._prefix, machine, self._words), str(number))

    def _unheard(self, number, machines):
        """Wait until so many machines have heard of a command; why it must not be written, or nothing."""
        until, heard = time.monotonic() + HEARD_S, 0
        while self._running and time.monotonic() < until:
            heard = int(self._store.add(self._prefix + "heard/%d" % number, 0))
            if heard >= machines:
                return ""
            time.sleep(HEARD_LOOK_S)
        return "Of %d other machines %d have answered in %d s; nothing was changed." % (machines, heard, HEARD_S)

    def close(self):
        """Let all machines stop to listen. In a forked child it does not live."""
        if self.is_alive():
            self._running = False
            self._waiting.put((NO_MORE, None))
            self.join(2)


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
        self.counted, self.herald = 0, None
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

    def refuse(self, command, why):
        """A command that was accepted will not be done."""
        with self._lock:
            self._pausing.discard(command["id"])
            resumers, self._resumers = ([], self._resumers) if self._pausing else (self._resumers, [])
        self.state(command["id"], {"state": "rejected", "reason": why})
        for command_id in resumers:
            self.state(command_id, {"state": "rejected", "reason": "The job is not paused."})

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
            self.counted += 1  # before the look at the herald, which reads it after it is there
            if self.herald is None:
                self.commands.append(message)
            else:
                self.herald.announce(self.counted, message)

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
