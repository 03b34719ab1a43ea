"""The node as the probe may touch it: files, programs, clocks, its network ports. Python 3.6 or newer.

Another host may stand in with the same methods: everything else of the probe reaches the world through one.
"""

import errno
import fcntl
import getpass
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time

HUNG_S = 30.0
MOMENT_S, MOMENT_TRIES = 0.025, 40
JOB_KEYS = {"SLURM_JOB_ID": "slurm_job", "RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "world_size"}
JOB_KEYS.update(OMPI_COMM_WORLD_RANK="rank", OMPI_COMM_WORLD_LOCAL_RANK="local_rank", SLURM_PROCID="rank")
JOB_KEYS.update(OMPI_COMM_WORLD_SIZE="world_size", SLURM_LOCALID="local_rank", SLURM_NTASKS="world_size")
# What the launcher itself gives its workers comes before what it was given.
JOB_ORDER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_JOB_ID")
IB_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors")


class System(object):
    """What the kernel tells of a node, from its files: `read`, `list` and `real` are the host's."""

    sample_s = 0.1
    """Seconds between two readings of power within a tick."""

    def place_of(self, bus):
        """A PCI device's NUMA node, the CPUs there, and the network ports that are closest to it."""
        if not bus:
            return {}
        domain, _, rest = bus.lower().partition(":")
        device = "/sys/bus/pci/devices/%s:%s" % (domain[-4:], rest)
        node = self.whole(device + "/numa_node")
        cpus = (self.read("/sys/devices/system/node/node%d/cpulist" % node) or "").strip() if node is not None else ""
        return {"numa_node": node if cpus else None, "cpus": cpus or None, "near": self._near(self.real(device), node)}

    def _near(self, path, node):
        """InfiniBand ports under the same switch or root as a PCI path; else those of the same NUMA node."""
        found, same = [], []
        for name in self.list("/sys/class/infiniband"):
            base = "/sys/class/infiniband/%s/device" % name
            shared = len(os.path.commonpath([path, self.real(base)]).split("/"))
            found.append((shared, name))
            if node is not None and node >= 0 and self.whole(base + "/numa_node") == node:
                same.append(name)
        best = max([shared for shared, _ in found] or [0])
        # /sys/devices/pci0000:00 is the root: ports that share no more than /sys/devices are not near.
        return [name for shared, name in found if shared == best] if best > 3 else same

    def ports(self):
        """(facts, received bytes, sent bytes, errors or None) of InfiniBand ports, whose counters are words of four
        bytes, and of physical Ethernet ports."""
        out = []
        for device in self.list("/sys/class/infiniband"):
            for port in self.list("/sys/class/infiniband/%s/ports" % device):
                base = "/sys/class/infiniband/%s/ports/%s/" % (device, port)
                state, rate = self.read(base + "state") or "", (self.read(base + "rate") or "").split()
                gbps = number_of(rate[0]) if rate else None
                facts = {"gpu": -1, "kind": "nic", "name": device if port == "1" else "%s/%s" % (device, port)}
                facts["state"] = "unknown" if not state else "active" if "ACTIVE" in state else "inactive"
                facts["gb_s"] = gbps / 8 if gbps else None
                counts = [self.whole(base + "counters/port_%s_data" % way) for way in ("rcv", "xmit")]
                errors = [self.whole(base + "counters/" + name) for name in IB_ERRORS]
                known = [e for e in errors if e is not None]
                words = [None if c is None else 4 * c for c in counts]
                out.append((facts, words[0], words[1], sum(known) if known else None))
        for name in self.list("/sys/class/net"):
            base = "/sys/class/net/%s/" % name
            if not self.list(base + "device") or self.list(base + "device/infiniband"):
                continue  # virtual, or the IP face of an InfiniBand port counted above
            speed, up = self.whole(base + "speed"), (self.read(base + "operstate") or "").strip()
            facts = {"gpu": -1, "kind": "nic", "name": name, "state": "active" if up == "up" else "inactive"}
            facts["gb_s"] = speed / 8000.0 if speed and speed > 0 else None
            out.append(
                (facts, self.whole(base + "statistics/rx_bytes"), self.whole(base + "statistics/tx_bytes"), None)
            )
        return out

    def leave_heir(self, give_back):
        """Have somebody outlive this program who gives back what it held; a host that cannot has nobody."""

    def keep(self, held):
        """Note what is held now, for the heir and for later probes."""

    def kept_by_others(self):
        """What other probes that live hold on this node."""
        return []

    def inherit(self, give_back, own):
        """Have what probes that are no more held given back, each note by one alone; `own`: at the start, before this
        one holds anything, also what an earlier probe of the same console left."""

    def wait(self, seconds):
        time.sleep(seconds)

    def started(self, pid):
        """When a process began, in the kernel's ticks; None for one that is not there."""
        words = (self.read("/proc/%d/stat" % pid) or "").rpartition(")")[2].split()
        return int(words[19]) if len(words) > 19 and words[19].isdigit() else None

    def stopped(self, pid):
        """When a process began, if it is stopped; else None."""
        words = (self.read("/proc/%d/stat" % pid) or "").rpartition(")")[2].split()
        return self.started(pid) if words and words[0] in "Tt" else None

    def signal(self, pid, stop):
        return "processes of this host cannot be stopped"

    def process(self, pid):
        """A process's name, the job that its environment names, and the CPUs it may run on."""
        found = {"name": (self.read("/proc/%d/comm" % pid) or "").strip()}
        values = {}
        for item in (self.read("/proc/%d/environ" % pid) or "").split("\0"):
            key, _, value = item.partition("=")
            if key in JOB_KEYS:
                values[key] = value[:40]
        for key in sorted(values, key=lambda k: k in JOB_ORDER):
            found[JOB_KEYS[key]] = values[key]
        for line in (self.read("/proc/%d/status" % pid) or "").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                found["cpus"] = line.partition(":")[2].strip()
        return found

    def load(self):
        words = (self.read("/proc/loadavg") or "").split()
        return number_of(words[0]) if words else None

    def whole(self, path):
        """The whole number a file holds; None when there is none."""
        try:
            return int(self.read(path))
        except (TypeError, ValueError):
            return None


class Host(System):
    """The real node."""

    def __init__(self, nvml, nvml_error=""):
        self.nvml, self.nvml_error = nvml, nvml_error
        self._claim, self._heir = None, None

    def leave_heir(self, give_back):
        """Forked before anything touches the driver or starts a thread. It reads what is held, a line a change, and
        acts at the end of input, which nothing that kills this program can prevent."""
        read, write = os.pipe()
        if os.fork():
            os.close(read)
            self._heir = write
            return
        os.close(write)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)  # or the connection would stay open as long as the heir lives
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        last = b""
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                last = line if line.endswith(b"\n") else last
        try:
            path, _, held = last.decode().partition("\t")
            if path:
                self._settle(path, give_back, patient=True)
            else:
                give_back(held or "[]")
        finally:
            os._exit(0)

    def keep(self, held):
        path = self._note() or ""
        try:
            if self._heir is not None:
                os.write(self._heir, ("%s\t%s\n" % (path, held)).encode())
        except (OSError, IOError):
            pass  # the heir was killed: the note is then all that a later probe has
        try:
            if path and held == "[]":
                self._forget(path)
            elif path:
                with open(path + ".new", "w") as file:
                    file.write(held)
                os.rename(path + ".new", path)
        except (OSError, IOError):
            pass  # the lease itself still ends by its time

    def _others(self):
        """(whether its probe lives, its path) of every note that another probe left."""
        place = self._own_directory()
        for name in self.list(place) if place else []:
            if not (name.startswith("leases-") and name.endswith(".json")):
                continue
            path = os.path.join(place, name)
            lock = path.replace("leases-", "probe-").replace(".json", ".lock")
            ours = self._claim is not None and lock == self._claim.name
            yield not ours and self._locked(lock), path

    def _locked(self, path):
        try:
            with open(path, "r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except (OSError, IOError) as error:
            return getattr(error, "errno", None) in (errno.EWOULDBLOCK, errno.EACCES)

    def kept_by_others(self):
        found = []
        for lives, path in self._others():
            if lives:
                try:
                    found += json.loads(self.read(path) or "[]")
                except ValueError:
                    pass
        return found

    def inherit(self, give_back, own):
        mine = self._note()
        for lives, path in list(self._others()):
            if path == mine:
                if own and give_back(self.read(path) or "[]"):
                    self._forget(path)
            elif not lives:
                self._settle(path, give_back, patient=False)

    def _settle(self, path, give_back, patient):
        """Give back what a note of a probe that is no more names. Under that probe's own lock: its heir, and other
        probes that find the note, would else do it again when somebody has set these boards anew."""
        try:
            lock = self._lock(
                path.replace("leases-", "probe-").replace(".json", ".lock"), MOMENT_TRIES if patient else 1
            )
        except (OSError, IOError):
            return  # somebody else is about it
        kept = self.read(path)
        if kept is not None and give_back(kept):
            self._forget(path)
        lock.close()

    def _forget(self, path):
        try:
            os.unlink(path)
        except OSError:
            pass

    def _note(self):
        """Where this probe notes what it holds; None where it has no place of its own."""
        if self._claim is None:
            return None
        return self._claim.name.replace("probe-", "leases-").replace(".lock", ".json")

    def signal(self, pid, stop):
        try:
            os.kill(pid, signal.SIGSTOP if stop else signal.SIGCONT)
            return ""
        except OSError as error:
            return "process %d cannot be %s: %s" % (pid, "stopped" if stop else "continued", error.strerror)

    def claim(self, console):
        """Be the one probe of this console on this node; a sentence when that cannot be.

        A probe of the same console that is still there has lost its connection and is asked to end. One that no longer
        moves hangs in the driver: nothing is started beside it.
        """
        place = self._own_directory()
        if place is None:
            return ""
        for name in self.list(place):
            path = os.path.join(place, name)
            if name.startswith("probe-") and not self._cleared(path, name == "probe-%s.lock" % console):
                held = "%.0f s" % (self.time() - os.stat(path).st_mtime)
                return "an earlier probe (%s) hangs in the driver since %s: none is started beside it" % (name, held)
        try:
            self._claim = self._lock(os.path.join(place, "probe-%s.lock" % console))
            self._claim.truncate(0)
            self._claim.write("%d\n" % os.getpid())
            self._claim.flush()
        except (OSError, IOError):
            return "another probe of this console runs on this node already"
        return ""

    def _lock(self, path, tries=MOMENT_TRIES):
        """The lock, open as long as the probe runs: the kernel lets go of it whatever ends it. Another probe that
        starts may be trying it, or clearing it away, at this very moment: then once more."""
        for left in reversed(range(tries)):
            file = open(path, "a+")  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:
                    return file
            except (OSError, IOError):
                pass
            file.close()
            if left:
                time.sleep(MOMENT_S)
        raise OSError("the lock is held")

    def _cleared(self, path, ours):
        """Whether nothing stands in the way at a lock: nobody holds it, or somebody who is well or could be ended.
        Other probes that start, or give back for a dead one, hold it for a moment and leave no name in it."""
        for left in reversed(range(MOMENT_TRIES)):
            try:
                with open(path, "r") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(path)
                        return True
                    except (OSError, IOError):
                        pid = number_of(file.readline())
                if not ours and self.time() - os.stat(path).st_mtime < HUNG_S:
                    return True
                if ours and pid and self._holds(int(pid), path):
                    return self._end(int(pid), path)
            except (OSError, IOError):
                return True
            if left:
                time.sleep(MOMENT_S)
        return False

    def _holds(self, pid, path):
        """Whether that process has the file open: the kernel may have given a dead probe's number to another's."""
        files = "/proc/%d/fd" % pid
        return any(self._same(os.path.join(files, number), path) for number in self.list(files))

    def _same(self, one, other):
        try:
            return os.path.samestat(os.stat(one), os.stat(other))
        except OSError:
            return False

    def _end(self, pid, path):
        """Ask a probe of ours to end, and wait until its lock is free."""
        if pid == os.getpid():
            return False
        os.kill(pid, signal.SIGTERM)
        for _ in range(60):
            with open(path, "r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except (OSError, IOError):
                    time.sleep(0.05)
        return False

    def alive(self):
        """Leave a sign that this probe still moves."""
        if self._claim is not None:
            try:
                os.utime(self._claim.name, None)
            except (OSError, IOError):
                pass

    def _own_directory(self):
        place = "/tmp/rackside-%d" % os.getuid()
        try:
            if not os.path.isdir(place):
                os.mkdir(place, 0o700)
            found = os.lstat(place)
            return place if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) else None
        except OSError:
            return None

    def read(self, path):
        try:
            with open(path, "rb") as file:
                return file.read(65536).decode("utf-8", "replace")
        except (OSError, IOError):
            return None

    def write(self, path, text):
        """Whether a file of the kernel took it."""
        try:
            with open(path, "w") as file:
                file.write(text)
            return True
        except (OSError, IOError):
            return False

    def list(self, path):
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def real(self, path):
        return os.path.realpath(path)

    def hostname(self):
        return socket.gethostname()

    def python(self):
        return "%d.%d.%d" % sys.version_info[:3]

    def user(self):
        try:
            return getpass.getuser()
        except Exception:
            return "USER"

    def is_root(self):
        return os.geteuid() == 0

    def time(self):
        return time.time()

    def monotonic(self):
        return time.monotonic()

    def hook_sockets(self):
        """Sockets of training jobs under our own directory; others' are none of our business."""
        runtime, out = os.environ.get("XDG_RUNTIME_DIR"), []
        places = [os.environ.get("RACKSIDE_HOOK_DIR"), "/run/user/%d/rackside" % os.getuid()]
        places += [os.path.join(runtime, "rackside") if runtime else None, "/tmp/rackside-%d" % os.getuid()]
        for place in dict.fromkeys(p for p in places if p):
            try:
                if os.lstat(place).st_uid != os.getuid():
                    continue
            except OSError:
                continue
            for name in self.list(place):
                path = os.path.join(place, name)
                try:
                    if name.endswith(".sock") and stat.S_ISSOCK(os.lstat(path).st_mode):
                        out.append(path)
                except OSError:
                    pass
        return out

    def run(self, argv, timeout_s, said=b""):
        """Run a program without a shell, with `said` as its input: (exit status, what it said)."""
        try:
            done = subprocess.run(argv, input=said, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s)
            return done.returncode, done.stdout.decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            return 124, "no answer within %d s" % timeout_s
        except OSError as error:
            return 127, str(error)


def number_of(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
