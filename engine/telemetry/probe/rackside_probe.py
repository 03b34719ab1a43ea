"""The probe: sent to a node over its SSH connection, reads GPUs and links, prints one JSON record a tick.

Python 3.6 or newer, standard library only. It touches the world through `host`, `stdin` and `stdout` alone, so that
whoever provides a host (see rackside_host) can run it. Every record is one line that begins with FRAME, so that banners
mixed into the output are told apart.

What is set through the probe is leased: without a renewal in time, or when the input ends, what was in force before is
put back (rackside_leases).
"""

import json
import queue
import signal
import threading

from rackside_gpus import Gpus
from rackside_leases import Clock, Leases, Power, Stopped, give_back
from rackside_values import mega

VERSION = 1
FRAME = b"\x1e"
RETRY_S = 10.0
LINE_LIMIT = 1 << 20
REMEMBERED = 256
SLOW_TICKS = 10
SETS = {"power_limit": "power", "clock_lock": "clock", "stop": "stop"}


def main(stdin, stdout, host, interval_s=1.0, console="", program=None):
    """Run until `stdin` ends. `stdin` and `stdout` are binary streams. A sentence when it must not run."""
    program = program or Probe
    host.leave_heir(lambda kept: give_back(host, kept, program.gpus_of, program.kinds))
    refusal = host.claim(console) if console else ""
    if refusal:
        return refusal
    host.inherit(lambda kept: give_back(host, kept, program.gpus_of, program.kinds), own=True)
    program(stdin, stdout, host, interval_s).run()
    return ""


class Ended(Exception):
    """Somebody asked this probe to end."""


def _end(signum, frame):
    raise Ended()


class Probe(object):
    """One node's reader. Everything happens on the thread that calls `run`; another only waits for input lines."""

    gpus_of = Gpus
    kinds = (Power, Clock, Stopped)

    def __init__(self, stdin, stdout, host, interval_s):
        self.stdout, self.host, self.interval_s = stdout, host, float(interval_s)
        self.lines = queue.Queue()
        self.gpus, self.seq, self.trouble = self.gpus_of(host), 0, None
        self.next_try = 0.0
        self.leases = Leases(self.gpus, host, self._print, self.kinds)
        self.results, self.order = {}, []
        self.links_told, self.errors_told, self.counted = None, None, {}
        reader = threading.Thread(target=self._listen, args=(stdin,), name="rackside-input")
        reader.daemon = True
        reader.start()

    def _listen(self, stdin):
        while True:
            try:
                line = stdin.readline(LINE_LIMIT)
            except (OSError, ValueError):
                line = b""
            self.lines.put(line or None)
            if not line:
                return

    def run(self):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end)
        try:
            self._discover()
            due = next_sample = self.host.monotonic()
            while True:
                now = self.host.monotonic()
                if now >= due:
                    self._tick()
                    self.leases.expire()
                    due += self.interval_s * max(1, int((self.host.monotonic() - due) / self.interval_s) + 1)
                    next_sample = self.host.monotonic() + self.host.sample_s
                elif now >= next_sample:
                    self.gpus.sample()
                    next_sample += self.host.sample_s
                if not self._take_line(max(0.0, min(due, next_sample) - self.host.monotonic())):
                    break
        except (OSError, ValueError, Ended):
            pass  # nobody reads any more
        finally:
            self.leases.release_all("the console is gone")

    def _take_line(self, wait_s):
        """Wait for one input line at most `wait_s`; False at the end of input."""
        try:
            line = self.lines.get(timeout=wait_s) if wait_s > 0 else self.lines.get_nowait()
        except queue.Empty:
            return True
        if line is None:
            return False
        try:
            command = json.loads(line.decode("utf-8"))
        except ValueError:
            return True
        if isinstance(command, dict):
            self._command(command)
        return True

    def _print(self, record):
        self.stdout.write(FRAME + json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n")
        self.stdout.flush()

    # Reading.

    def _discover(self):
        """Find the GPUs and greet; on failure with the trouble, and another try after RETRY_S."""
        self.next_try = self.host.monotonic() + RETRY_S
        self.trouble = self.gpus.discover()
        self.links_told, self.errors_told = None, None
        self._print(
            {
                "hello": VERSION,
                "hostname": self.host.hostname(),
                "python": self.host.python(),
                "driver": self.gpus.driver(),
                "trouble": self.trouble,
                "gpus": [gpu.facts for gpu in self.gpus.all],
            }
        )

    def _tick(self):
        if not self.gpus.all and self.host.monotonic() >= self.next_try:
            self._discover()
        began = self.host.monotonic()
        self.host.alive()
        record, links = self.gpus.tick(began)
        for facts, received, sent, errors in self.host.ports():
            rates = [mega(self._rate((facts["name"], way), count, began)) for way, count in ((0, received), (1, sent))]
            links.append((facts, rates[0], rates[1], errors))
        self.seq += 1
        record.update(
            tick=self.seq,
            time=self.host.time(),
            rx_mb_s=[row[1] for row in links],
            tx_mb_s=[row[2] for row in links],
            load=self.host.load(),
            hooks=self.host.hook_sockets(),
        )
        if self.trouble:
            record["trouble"] = self.trouble
        facts = [row[0] for row in links]
        if facts != self.links_told:
            record["links"] = self.links_told = facts
            self.errors_told = None
        errors = [row[3] for row in links]
        if self.seq % SLOW_TICKS == 1 and errors != self.errors_told:
            record["link_errors"] = self.errors_told = errors
        record["took_ms"] = round(1000 * (self.host.monotonic() - began), 2)
        self._print(record)

    def _rate(self, key, count, now):
        """A counter's growth a second; None when it is new or did not grow."""
        before = self.counted.get(key)
        self.counted[key] = (now, count)
        if count is None or before is None or before[1] is None or now <= before[0] or count < before[1]:
            return None
        return (count - before[1]) / (now - before[0])

    # Acting.

    def _command(self, command):
        if command.get("do") == "renew":
            self.leases.renew()
            return
        if command.get("do") == "interval":
            self.interval_s = min(60.0, max(0.1, float(number_of(command.get("seconds")) or self.interval_s)))
            return
        command_id = str(command.get("id", ""))[:128]
        if command_id not in self.results:
            self._remember(command_id, self._act(command))
        self._print(dict(self.results[command_id], result=command_id))

    def _remember(self, command_id, result):
        self.results[command_id] = result
        self.order.append(command_id)
        if len(self.order) > REMEMBERED:
            self.results.pop(self.order.pop(0), None)

    def _act(self, command):
        try:
            if command.get("do") in SETS:
                return self._set(command)
            if command.get("do") == "examine":
                return self._examine()
            if command.get("do") == "restore":
                return self._restore(command)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            return {"state": "failed", "gpus": {}, "reason": "the command is malformed: %r" % (error,)}
        return {"state": "failed", "gpus": {}, "reason": "this probe cannot do %r" % (command.get("do"),)}

    def _examine(self):
        """What this user may do on this node. Nothing is changed."""
        found = {"may_limit": self._may(), "user": self.host.user()}
        return {"state": "done", "gpus": {}, "reason": "", "found": found}

    def _may(self):
        """Whether limits may be set here, in words."""
        if self.host.is_root():
            return "yes, as root"
        status, said = self.host.run(["sudo", "-n", "-l", "nvidia-smi", "-i", "0", "-pl", "500"], 10.0)
        return "yes, by sudo" if status == 0 else "no: %s" % (said.strip()[-120:] or "sudo refuses")

    def _set(self, command):
        """All of the command or none of it."""
        kind = SETS[command["do"]]
        unit = 1000.0 if kind == "power" else 1.0
        wanted = command["gpus"].items() if kind != "stop" else ((pid, 1.0) for pid in command["pids"])
        values = {int(i): None if v is None else round(float(v) * unit) for i, v in wanted}
        lease_s = command.get("lease_s")
        lease_s = None if lease_s is None else float(lease_s)
        if kind == "stop" and lease_s is None:
            raise ValueError("a process is stopped for a time only")
        operator = str(command.get("operator", ""))[:80]
        state, report, reason = self.leases.set(kind, values, lease_s, operator)
        suffix = "_mhz" if kind == "clock" else "_w"
        told = {i: {k + suffix: v for k, v in row.items()} for i, row in report.items()} if kind != "stop" else {}
        return {"state": state, "gpus": told, "reason": reason}

    def _restore(self, command):
        kind = command.get("what", "power")
        kept = self.leases.restore(kind, [int(i) for i in command.get("pids" if kind == "stop" else "gpus", [])])
        return {"state": "failed" if kept else "done", "gpus": {}, "reason": "; ".join(kept)}


def number_of(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
