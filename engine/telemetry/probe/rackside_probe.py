"""The probe: sent to a node over its SSH connection, reads GPUs and links, prints one JSON record a tick.

Python 3.6 or newer, standard library only. It touches the world through `host`, `stdin` and `stdout` alone, so that
whoever provides a host (see rackside_host) can run it. Every record is one line that begins with FRAME, so that banners
mixed into the output are told apart.

Power limits set through the probe are leased: without a renewal in time, or when the input ends, the limit that was in
force before is put back, if the present one still is ours.
"""

import json
import queue
import signal
import threading

from rackside_gpus import Gpus, mega

VERSION = 1
FRAME = b"\x1e"
RETRY_S = 10.0
LINE_LIMIT = 1 << 20
REMEMBERED = 256
ERROR_NO_PERMISSION = 4
SLOW_TICKS = 10


def main(stdin, stdout, host, interval_s=1.0, console=""):
    """Run until `stdin` ends. `stdin` and `stdout` are binary streams. A sentence when it must not run."""
    refusal = host.claim(console) if console else ""
    if refusal:
        return refusal
    Probe(stdin, stdout, host, interval_s).run()
    return ""


class Ended(Exception):
    """Somebody asked this probe to end."""


def _end(signum, frame):
    raise Ended()


class Probe(object):
    """One node's reader. Everything happens on the thread that calls `run`; another only waits for input lines."""

    def __init__(self, stdin, stdout, host, interval_s):
        self.stdout, self.host, self.interval_s = stdout, host, float(interval_s)
        self.lines = queue.Queue()
        self.gpus, self.seq, self.trouble = Gpus(host), 0, None
        self.next_try = 0.0
        self.leases, self.results, self.order = {}, {}, []
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
                    self._expire()
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
            self._release(list(self.leases), "the console is gone")

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
            self._renew()
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
            if command.get("do") == "power_limit":
                return self._set_limits(command)
            if command.get("do") == "examine":
                return self._examine()
            if command.get("do") == "restore":
                wanted = [int(i) for i in command.get("gpus", [])]
                kept = self._release(wanted, None)
                reason = "; ".join(kept)
                return {"state": "failed" if kept else "done", "gpus": {}, "reason": reason}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            return {"state": "failed", "gpus": {}, "reason": "the command is malformed: %r" % (error,)}
        return {"state": "failed", "gpus": {}, "reason": "this probe cannot do %r" % (command.get("do"),)}

    def _examine(self):
        """What this user may do on this node. Nothing is changed."""
        if self.host.is_root():
            may = "yes, as root"
        else:
            command = ["sudo", "-n", "-l", "nvidia-smi", "-i", "0", "-pl", "500"]
            status, said = self.host.run(command, 10.0)
            may = "yes, by sudo" if status == 0 else "no: %s" % (said.strip()[-120:] or "sudo refuses")
        return {"state": "done", "gpus": {}, "reason": "", "found": {"may_limit": may, "user": self.host.user()}}

    def _set_limits(self, command):
        """All GPUs of the command or none: when one refuses, those already set are put back."""
        wanted = {int(i): round(float(w) * 1000) for i, w in command["gpus"].items()}
        lease_s = command.get("lease_s")
        lease_s = None if lease_s is None else float(lease_s)
        done, report, reason = [], {}, ""
        for index in sorted(wanted):
            before = self._limit_mw(index)
            error = self._set_limit(index, wanted[index])
            after = self._limit_mw(index)
            if not error and after != wanted[index]:
                error = "the driver took %d W and kept %s W" % (wanted[index] // 1000, watts(after))
            report[str(index)] = {"before_w": watts(before), "asked_w": wanted[index] / 1000.0, "now_w": watts(after)}
            if error:
                reason = "GPU %d: %s" % (index, error)
                break
            done.append((index, before))
        if not reason:
            for index, before in done:
                held = self.leases.get(index)
                if lease_s is None:
                    self.leases.pop(index, None)
                else:
                    first = held["before"] if held and held["ours"] == before else before
                    until = self.host.monotonic() + lease_s
                    self.leases[index] = {"before": first, "ours": wanted[index], "until": until, "lease_s": lease_s}
            return {"state": "done", "gpus": report, "reason": ""}
        stuck = [index for index, before in done if self._set_limit(index, before)]
        if done:
            reason += "; the %d set before it were put back" % (len(done) - len(stuck))
        if stuck:
            reason += ", but not GPU %s" % ", ".join(map(str, stuck))
        return {"state": "partial" if stuck else "failed", "gpus": report, "reason": reason}

    def _limit_mw(self, index):
        gpu = self._gpu(index)
        value = "lost" if gpu is None else self.gpus.read("nvmlDeviceGetPowerManagementLimit", gpu.handle)
        return None if isinstance(value, str) else int(value)

    def _gpu(self, index):
        """The GPU of that index, if it answers."""
        gpu = self.gpus.all[index] if 0 <= index < len(self.gpus.all) else None
        return None if gpu is None or gpu.handle is None else gpu

    def _set_limit(self, index, milliwatts):
        """Set one limit; an empty text, or why not. The first form of the call: the second always claims success."""
        gpu, nvml = self._gpu(index), self.host.nvml
        if gpu is None:
            return "there is no such GPU on this node"
        facts = gpu.facts
        low, high = facts["power_limit_min_w"], facts["power_limit_max_w"]
        if not isinstance(low, str) and not low * 1000 <= milliwatts <= high * 1000:
            return "%d W is outside the %d to %d W that the board allows" % (milliwatts // 1000, low, high)
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(gpu.handle, milliwatts)
            return ""
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != ERROR_NO_PERMISSION:
                return "the driver refused %d W: %s" % (milliwatts // 1000, error)
        return self._sudo_limit(facts.get("bus_id"), milliwatts)

    def _sudo_limit(self, bus, milliwatts):
        command = ["sudo", "-n", "nvidia-smi", "-i", str(bus), "-pl", str(milliwatts // 1000)]
        status, output = self.host.run(command, 10.0)
        if status == 0:
            return ""
        return (
            "this user may not set power limits, and 'sudo -n nvidia-smi -pl' was refused (%s); allow it with the "
            "sudoers line '%s ALL=(root) NOPASSWD: /usr/bin/nvidia-smi -i * -pl *'"
        ) % (output.strip()[-120:] or "exit %s" % status, self.host.user())

    def _renew(self):
        for lease in self.leases.values():
            lease["until"] = self.host.monotonic() + lease["lease_s"]

    def _expire(self):
        now = self.host.monotonic()
        self._release([i for i, lease in self.leases.items() if lease["until"] <= now], "the lease ran out")

    def _release(self, indexes, why):
        """Put back what was in force before, if the present limit still is ours. Returns what could not be done."""
        kept = []
        for index in indexes:
            lease = self.leases.pop(index, None)
            if lease is None:
                if why is None:
                    kept.append("GPU %d: this console holds no limit there" % index)
                continue
            now = self._limit_mw(index)
            error = ""
            if now == lease["ours"]:
                error = self._set_limit(index, lease["before"])
            elif why is None:
                error = "somebody else has set %s W since; it is left alone" % watts(now)
            if error:
                kept.append("GPU %d: %s" % (index, error))
            if why is not None:
                self._say_released(index, lease, error, why)
        return kept

    def _say_released(self, index, lease, error, why):
        try:
            record = {"released": index, "limit_w": watts(lease["before"]), "reason": why, "error": error}
            self._print(record)
        except (OSError, ValueError):
            pass


def watts(milliwatts):
    return None if milliwatts is None else milliwatts / 1000.0


def number_of(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
