"""What the probe holds down on a node: power limits, SM clock locks and stopped processes, each leased.

Python 3.6 or newer. A lease that is not renewed in time, or whose probe ends, is given back: what was in force before
comes back, if the present value still is ours. Three layers see to it: the probe itself; its heir, a process forked at
its start that outlives a SIGKILL of the probe; and the next probe of whatever console, from a file that names what was
held.
"""

import json

ERROR_NO_PERMISSION = 4
ERROR_UNSUPPORTED = 3
CLOCK_SLACK_MHZ = 45
LOOKS, LOOK_S = 10, 0.1
UNREAD = "what limit was in force before could not be read, so this one stays"
SUDOERS = "'%s ALL=(root) NOPASSWD: {0} -pl *, {0} -lgc *, {0} -rgc'".format("/usr/bin/nvidia-smi -i *")


class Board(object):
    """Something of a GPU; an index is the GPU's on this node, its board is known by its UUID: what another program of
    this node calls GPU 0 may be another one."""

    def __init__(self, gpus, host):
        self.gpus, self.host = gpus, host

    def board(self, index):
        gpu = self.gpus.answering(index)
        return None if gpu is None else gpu.facts.get("uuid") or gpu.facts.get("bus_id")

    def index_of(self, lease):
        """Where the board of a lease is now; None where this program does not see it."""
        found = [index for index in range(len(self.gpus.all)) if self.board(index) == lease["board"]]
        return found[0] if found else None


class Power(Board):
    """Power limits in mW."""

    name = "power"

    def now(self, index):
        gpu = self.gpus.answering(index)
        value = "lost" if gpu is None else self.gpus.read("nvmlDeviceGetPowerManagementLimit", gpu.handle)
        return None if isinstance(value, str) else int(value)

    def put(self, index, milliwatts):
        """An empty text, or why not. The first form of the call: the second always claims success."""
        gpu, nvml = self.gpus.answering(index), self.host.nvml
        if gpu is None:
            return "there is no such GPU on this node"
        if milliwatts is None:
            return UNREAD
        low, high = gpu.facts["power_limit_min_w"], gpu.facts["power_limit_max_w"]
        if not isinstance(low, str) and not low * 1000 <= milliwatts <= high * 1000:
            return "%d W is outside the %d to %d W that the board allows" % (milliwatts // 1000, low, high)
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(gpu.handle, milliwatts)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != ERROR_NO_PERMISSION:
                return "the driver refused %d W: %s" % (milliwatts // 1000, error)
            refused = sudo(self.host, gpu, ["-pl", str(milliwatts // 1000)], "set power limits")
            if refused:
                return refused
        after = self.now(index)
        return "" if after == milliwatts else kept_other(milliwatts, after)

    def ours(self, index, lease):
        return self.now(index) in [lease["ours"], *lease["steps"]]

    def told(self, value):
        return None if value is None else value / 1000.0


def kept_other(asked, kept):
    """The driver took a limit in mW and shows another one, or none."""
    shown = "does not tell what it kept" if kept is None else "kept %s W" % (kept / 1e3)
    return "the driver took %d W and %s" % (asked // 1000, shown)


class Clock(Board):
    """Highest SM clock in MHz, None where none is locked. The driver does not tell a lock: what this probe locked is
    known here, and its effect is read."""

    name = "clock"

    def __init__(self, gpus, host):
        Board.__init__(self, gpus, host)
        self.locked = {}

    def now(self, index):
        return self.locked.get(index)

    def put(self, index, mhz):
        gpu, nvml = self.gpus.answering(index), self.host.nvml
        if gpu is None:
            return "there is no such GPU on this node"
        most = gpu.facts.get("sm_clock_max_mhz")
        if mhz is not None and not isinstance(most, str) and most and not 0 < mhz <= most:
            return "%d MHz is outside the 1 to %d MHz that the board allows" % (mhz, most)
        try:
            if mhz is None:
                nvml.nvmlDeviceResetGpuLockedClocks(gpu.handle)
            else:
                nvml.nvmlDeviceSetGpuLockedClocks(gpu.handle, 0, mhz)
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code == ERROR_UNSUPPORTED:
                return "this board cannot lock its clock"
            if code != ERROR_NO_PERMISSION:
                return "the driver refused %s MHz: %s" % (mhz, error)
            words = ["-rgc"] if mhz is None else ["-lgc", "0,%d" % mhz]
            refused = sudo(self.host, gpu, words, "lock clocks")
            if refused:
                return refused
        self.locked[index] = mhz
        return "" if mhz is None else self._followed(gpu, mhz)

    def _followed(self, gpu, mhz):
        """Whether the clock came down: nothing else shows that a lock is in force."""
        now = None
        for _ in range(LOOKS):
            now = self.gpus.read("nvmlDeviceGetClockInfo", gpu.handle, 1)
            if isinstance(now, str) or now <= mhz + CLOCK_SLACK_MHZ:
                return ""
            self.host.wait(LOOK_S)
        return "the driver took a lock at %d MHz and the clock still is %d MHz" % (mhz, now)

    def ours(self, index, lease):
        return True  # nobody can tell; a lock that is not there is reset without harm

    def told(self, value):
        return None if value is None else float(value)


class Stopped(object):
    """Processes on this node's GPUs, stopped: an index is a pid, its value when it was started if it is stopped, None
    while it runs."""

    name = "stop"

    def __init__(self, gpus, host):
        self.gpus, self.host = gpus, host

    def board(self, pid):
        return self.host.started(pid)

    def index_of(self, lease):
        return lease["index"]

    def now(self, pid):
        return self.host.stopped(pid)

    def put(self, pid, started):
        """Stop a process (any value), or let it go on (None)."""
        if started is not None and pid not in self.gpus.jobs:
            return "process %d is not on a GPU of this node" % pid
        refused = self.host.signal(pid, started is not None)
        for _ in range(0 if refused or started is None else LOOKS):
            if self.now(pid) is not None:
                return ""
            self.host.wait(LOOK_S / 5)
        return refused or ("" if started is None else "process %d was told to stop and still runs" % pid)

    def ours(self, pid, lease):
        return self.now(pid) is not None and self.host.started(pid) == lease["ours"]

    def told(self, value):
        return None


def sudo(host, gpu, words, what):
    status, output = host.run(["sudo", "-n", "nvidia-smi", "-i", str(gpu.facts.get("bus_id")), *words], 10.0)
    if status == 0:
        return ""
    said = output.strip()[-120:] or "exit %s" % status
    return ("this user may not %s, and 'sudo -n nvidia-smi %s' was refused (%s); allow it with the sudoers line %s") % (
        what,
        words[0],
        said,
        SUDOERS % host.user(),
    )


class Leases(object):
    """All that is held. `say` prints a record to the console."""

    def __init__(self, gpus, host, say, kinds):
        self.host, self.say = host, say
        self.kinds = {kind.name: kind(gpus, host) for kind in kinds}
        self.held = {}

    def set(self, kind_name, wanted, lease_s, operator):
        """Set every value of {index: value} or none: (state, {index: {before, asked, now}}, reason)."""
        if kind_name not in self.kinds:
            return "failed", {}, "this node's processes cannot be stopped from here"
        # A probe that was just killed may have held these boards: what it set is not what was there before.
        self.host.inherit(lambda kept: put_back(kept, self.kinds), own=False)
        kind, done, report = self.kinds[kind_name], [], {}
        reason = self._taken(kind_name, wanted, lease_s)
        was = dict(self.held)
        if not reason and lease_s is not None:
            # Noted before anything is set: whatever ends this probe half-way, somebody gives back what is ours by then.
            for index in wanted:
                self._lease(kind, index, wanted[index], lease_s, operator)
            self._keep()
        for index in [] if reason else sorted(wanted):
            before = kind.now(index)
            error = kind.put(index, wanted[index])
            now = kind.now(index)
            report[str(index)] = {"before": kind.told(before), "asked": kind.told(wanted[index]), "now": kind.told(now)}
            if error:
                reason = "%s %d: %s" % ("process" if kind_name == "stop" else "GPU", index, error)
                if now != before:  # it took something, if not what was asked for
                    done.append((index, before))
                break
            done.append((index, before))
        if not reason:
            return "done", report, ""
        back = [(index, kind.put(index, before)) for index, before in done]
        stuck = [index for index, error in back if error]
        if done:
            reason += "; the %d set before it were put back" % (len(done) - len(stuck))
        if stuck:
            reason += ", but not %s" % ", ".join(map(str, stuck))
        self.held = was
        self._keep()
        return ("partial" if stuck else "failed"), report, reason

    def _lease(self, kind, index, value, lease_s, operator):
        """`before` is what comes back at the end; `steps` what this console had set on the way, one undo each."""
        earlier, before = self.held.get((kind.name, index)), kind.now(index)
        steps = []
        if earlier and kind.ours(index, earlier):
            before, steps = earlier["before"], [*earlier["steps"], earlier["ours"]]
        board = kind.board(index)
        ours = board if kind.name == "stop" else value
        until = self.host.monotonic() + lease_s
        lease = {"kind": kind.name, "index": index, "board": board, "before": before, "ours": ours, "steps": steps}
        self.held[kind.name, index] = dict(lease, until=until, lease_s=lease_s, operator=operator)

    def _taken(self, kind, wanted, lease_s):
        """Who holds one of these so that it must not be set: consoles that hold each other's limits would never come
        back to the first, and a permanent value over a lease would lose what was before it."""
        if lease_s is None:
            leased = [index for index in sorted(wanted) if (kind, index) in self.held]
            if leased:
                return "GPU %d is leased by this console; undo that before it is made permanent" % leased[0]
        boards = {self.kinds[kind].board(index): index for index in wanted}
        for other in self.host.kept_by_others():
            if other.get("kind") == kind and other.get("board") in boards:
                what = "process" if kind == "stop" else "GPU"
                held = (what, boards[other["board"]], other.get("operator") or "another console")
                return "%s %d is held by %s; it is to be undone there first" % held
        return ""

    def restore(self, kind_name, indexes):
        """Undo one step of each at once: what this console had set before, else what was there before it; what could
        not be done, as sentences."""
        kind, back, last = self.kinds[kind_name], [], []
        for index in indexes:
            lease = self.held.get((kind_name, index))
            if lease and lease["steps"] and kind.ours(index, lease):
                back.append((index, lease))
            else:
                last.append((kind_name, index))
        kept = []
        for index, lease in back:
            error = kind.put(index, lease["steps"][-1])
            if error:
                kept.append("GPU %d: %s" % (index, error))
            else:
                self.held[kind_name, index] = dict(lease, ours=lease["steps"][-1], steps=lease["steps"][:-1])
        return kept + self._release(last, None)

    def renew(self):
        """The console lives. A stopped process goes on at its time all the same."""
        for lease in self.held.values():
            if lease["kind"] != "stop":
                lease["until"] = self.host.monotonic() + lease["lease_s"]

    def expire(self):
        now = self.host.monotonic()
        late = [key for key, lease in self.held.items() if lease["until"] <= now]
        if late:
            self._release(late, "the lease ran out")

    def release_all(self, why):
        self._release(list(self.held), why)

    def _release(self, keys, why):
        """Put back what was in force before, if the present value still is ours. Returns what could not be done."""
        kept = []
        for key in keys:
            lease, (kind_name, index) = self.held.pop(key, None), key
            kind = self.kinds[kind_name]
            if lease is None:
                if why is None:
                    kept.append("GPU %d: this console holds nothing there" % index)
                continue
            error = ""
            if kind.ours(index, lease):
                error = kind.put(index, lease["before"])
            elif why is None and kind_name == "power":
                error = "somebody else has set %s W since; it is left alone" % kind.told(kind.now(index))
            if error:
                kept.append("GPU %d: %s" % (index, error))
            if why is not None:
                self._say_released(kind, lease, error, why)
        self._keep()
        return kept

    def _say_released(self, kind, lease, error, why):
        try:
            told = kind.told(lease["before"])
            self.say({"released": lease["index"], "what": kind.name, "value": told, "reason": why, "error": error})
        except (OSError, ValueError):
            pass

    def _keep(self):
        """Tell the heir and leave the file: what is held now."""
        self.host.keep(json.dumps(list(self.held.values())))


def give_back(host, kept, gpus_of, kinds):
    """Give back what a probe that is no more held, for the heir and for the next probe; see `put_back`."""
    gpus = gpus_of(host)
    if kept != "[]":
        gpus.discover()
    return put_back(kept, {kind.name: kind(gpus, host) for kind in kinds})


def put_back(kept, kinds):
    """What a probe held, `kept` as it was left, as it was before. Whether all of it was seen: what is on boards that
    this program does not see is left to one that does."""
    try:
        leases = [lease for lease in json.loads(kept) if isinstance(lease["kind"], str)]
    except (ValueError, TypeError, KeyError):
        return True  # cut short or not ours: nothing is touched on a guess
    seen = True
    for lease in leases:
        kind = kinds.get(lease["kind"])
        index = None if kind is None else kind.index_of(lease)
        if index is None:
            seen = False
        elif kind.ours(index, lease):
            kind.put(index, lease["before"])
    return seen
