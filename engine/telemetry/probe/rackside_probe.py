"""The probe: sent to a node over its SSH connection, reads NVML and sysfs, prints one JSON record a tick.

Python 3.6 or newer, standard library only. It touches the world through `host`, `stdin` and `stdout` alone, so that
whoever provides a host (see class Host) can run it. Every record is one line that begins with FRAME, so that banners
mixed into the output are told apart.

A reading is a number, or one of the words absent, unsupported, error, lost: never 0 for what was not read.
Power limits set through the probe are leased: without a renewal in time, or when the input ends, the limit that was in
force before is put back, if the present one still is ours.
"""

import json
import queue
import threading

VERSION = 1
FRAME = b"\x1e"
RETRY_S = 10.0
LINE_LIMIT = 1 << 20
MAX_NVLINKS = 18
REMEMBERED = 256

# NVML's numbers, the same in every driver; pynvml may be older than the driver and lack the names.
FI_MEMORY_TEMP, FI_NVLINK_SPEED = 82, 90
FI_NVLINK_TX, FI_NVLINK_RX = 138, 139
FI_PCIE_TX, FI_PCIE_RX = 197, 198
ERROR_UNSUPPORTED, ERROR_NO_PERMISSION, ERROR_NOT_FOUND = (3, 25), 4, (6, 13)
ERROR_LOST, ERROR_DRIVER = (15, 16), (9, 18)
KIB = 1024


def main(stdin, stdout, host, interval_s=1.0):
    """Run until `stdin` ends. `stdin` and `stdout` are binary streams."""
    Probe(stdin, stdout, host, interval_s).run()


class Probe(object):
    """One node's reader. Everything happens on the thread that calls `run`; another only waits for input lines."""

    def __init__(self, stdin, stdout, host, interval_s):
        self.stdout, self.host, self.interval_s = stdout, host, float(interval_s)
        self.lines = queue.Queue()
        self.gpus, self.seq, self.trouble = [], 0, None
        self.next_try = 0.0
        self.leases, self.results, self.order = {}, {}, []
        self.slow_turn = 0
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
        try:
            self._discover()
            due = self.host.monotonic()
            while True:
                now = self.host.monotonic()
                if now >= due:
                    self._tick()
                    self._expire()
                    due += self.interval_s * max(1, int((self.host.monotonic() - due) / self.interval_s) + 1)
                if not self._take_line(max(0.0, due - self.host.monotonic())):
                    break
        except (OSError, ValueError):
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
        self.stdout.write(FRAME + json.dumps(record).encode("ascii") + b"\n")
        self.stdout.flush()

    # Reading.

    def _read(self, name, *args):
        """One NVML call: its value, or the word for why there is none."""
        nvml = self.host.nvml
        try:
            return getattr(nvml, name)(*args)
        except AttributeError:
            return "absent"
        except nvml.NVMLError as error:
            return word_of(getattr(error, "value", None))
        except Exception:
            return "error"

    def _discover(self):
        """Start NVML and find the GPUs; on failure a `trouble` record, and another try after RETRY_S."""
        self.gpus, self.next_try = [], self.host.monotonic() + RETRY_S
        trouble = self._start_nvml()
        if trouble is None:
            count = self._read("nvmlDeviceGetCount")
            self.gpus = [self._describe(i) for i in range(count)] if not isinstance(count, str) else []
            if not self.gpus:
                trouble = "the NVIDIA driver answers but shows no GPU"
        self.trouble = trouble
        self._print(
            {
                "hello": VERSION,
                "hostname": self.host.hostname(),
                "python": self.host.python(),
                "driver": text_of(self._read("nvmlSystemGetDriverVersion")) if self.gpus else None,
                "trouble": trouble,
                "gpus": [gpu["facts"] for gpu in self.gpus],
            }
        )

    def _start_nvml(self):
        nvml = self.host.nvml
        if nvml is None:
            return "the module that reads NVML could not be loaded: %s" % self.host.nvml_error
        try:
            nvml.nvmlInit()
            return None
        except Exception as error:
            value = getattr(error, "value", None)
            if value == 18:
                return "driver/library version mismatch: the NVIDIA kernel module and library differ; reboot the node"
            if value in (9, 12):
                return "no NVIDIA driver is loaded on this node (%s)" % error
            return "NVML does not start: %s" % error

    def _describe(self, index):
        """A GPU's handle and the facts that do not change."""
        handle = self._read("nvmlDeviceGetHandleByIndex", index)
        facts = {"index": index}
        if isinstance(handle, str):
            facts["lost"] = True
            return {"handle": None, "facts": facts, "lost": True}
        pci = self._read("nvmlDeviceGetPciInfo", handle)
        bus = text_of(getattr(pci, "busId", None)) if not isinstance(pci, str) else None
        memory = self._read("nvmlDeviceGetMemoryInfo", handle)
        limits = self._read("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        low, high = (limits, limits) if isinstance(limits, str) else (scaled(limits[0], 1e-3), scaled(limits[1], 1e-3))
        gen = self._read("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = self._read("nvmlDeviceGetMaxPcieLinkWidth", handle)
        facts.update(
            name=text_of(self._read("nvmlDeviceGetName", handle)),
            uuid=text_of(self._read("nvmlDeviceGetUUID", handle)),
            bus_id=bus,
            memory_total_mib=memory if isinstance(memory, str) else scaled(memory.total, 1.0 / (KIB * KIB)),
            power_limit_min_w=low,
            power_limit_max_w=high,
            power_limit_default_w=scaled(self._read("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1e-3),
            sm_clock_max_mhz=self._read("nvmlDeviceGetMaxClockInfo", handle, 1),
            shutdown_c=self._read("nvmlDeviceGetTemperatureThreshold", handle, 0),
            slowdown_c=self._read("nvmlDeviceGetTemperatureThreshold", handle, 1),
            numa_node=self._numa(bus),
            pcie_gen=gen,
            pcie_width=width,
        )
        links = []
        for link in range(MAX_NVLINKS):
            state = self._read("nvmlDeviceGetNvLinkState", handle, link)
            if isinstance(state, str):
                break
            links.append(link)
        facts["nvlinks"] = len(links)
        return {"handle": handle, "facts": facts, "lost": False, "links": links, "pcie": None}

    def _numa(self, bus):
        if not bus:
            return None
        domain, _, rest = bus.lower().partition(":")
        found = self.host.read("/sys/bus/pci/devices/%s:%s/numa_node" % (domain[-4:], rest))
        try:
            return int(found)
        except (TypeError, ValueError):
            return None

    def _tick(self):
        if not self.gpus and self.host.monotonic() >= self.next_try:
            self._discover()
        began = self.host.monotonic()
        self.seq += 1
        readings = [self._gpu(gpu) for gpu in self.gpus]
        record = {
            "tick": self.seq,
            "time": self.host.time(),
            "gpus": readings,
            "nics": self._nics(),
            "load": self._load(),
            "hooks": self.host.hook_sockets(),
            "trouble": self.trouble,
            "lost": [gpu["facts"].get("bus_id") or "index %d" % i for i, gpu in enumerate(self.gpus) if gpu["lost"]],
        }
        self.slow_turn += 1
        record["took_ms"] = round(1000 * (self.host.monotonic() - began), 2)
        self._print(record)

    def _gpu(self, gpu):
        handle = gpu["handle"]
        if handle is None:
            return {"lost": True}
        utilisation = self._read("nvmlDeviceGetUtilizationRates", handle)
        memory = self._read("nvmlDeviceGetMemoryInfo", handle)
        throttle = self._read("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if isinstance(throttle, str):
            throttle = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        temperature = self._read("nvmlDeviceGetTemperature", handle, 0)
        gpu["lost"] = temperature == "lost"
        fields = self._fields(gpu)
        return {
            "temperature_c": temperature,
            "memory_temperature_c": fields.get("memory_temperature_c", "unsupported"),
            "margin_c": self._read("nvmlDeviceGetMarginTemperature", handle),
            "power_w": scaled(self._read("nvmlDeviceGetPowerUsage", handle), 1e-3),
            "power_limit_w": scaled(self._read("nvmlDeviceGetPowerManagementLimit", handle), 1e-3),
            "sm_clock_mhz": self._read("nvmlDeviceGetClockInfo", handle, 1),
            "memory_clock_mhz": self._read("nvmlDeviceGetClockInfo", handle, 2),
            "utilization_pct": utilisation if isinstance(utilisation, str) else utilisation.gpu,
            "memory_used_mib": memory if isinstance(memory, str) else scaled(memory.used, 1.0 / (KIB * KIB)),
            "throttle": throttle,
            "energy_j": scaled(self._read("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
            "nvlinks": fields.get("nvlinks", []),
            "pcie": fields.get("pcie") or self._pcie_rate(gpu),
            "processes": self._processes(handle, memory),
        }

    def _fields(self, gpu):
        """Memory temperature, NVLink and PCIe counters in one call: bytes since the driver started."""
        wanted = [FI_MEMORY_TEMP, FI_PCIE_TX, FI_PCIE_RX, FI_NVLINK_SPEED]
        for link in gpu["links"]:
            wanted += [(FI_NVLINK_TX, link), (FI_NVLINK_RX, link)]
        values = self._read("nvmlDeviceGetFieldValues", gpu["handle"], wanted)
        if isinstance(values, str) or len(values) < len(wanted):
            return {}
        numbers = [field_value(v) for v in values]
        found = {"memory_temperature_c": numbers[0]}
        if not isinstance(numbers[1], str) and not isinstance(numbers[2], str):
            found["pcie"] = {"tx_b": numbers[1], "rx_b": numbers[2]}
        speed = numbers[3] if not isinstance(numbers[3], str) else None
        links = []
        for place, link in enumerate(gpu["links"]):
            active = self._read("nvmlDeviceGetNvLinkState", gpu["handle"], link)
            tx, rx = numbers[4 + 2 * place], numbers[5 + 2 * place]
            links.append(
                {
                    "link": link,
                    "active": bool(active) if not isinstance(active, str) else None,
                    "tx_b": tx if isinstance(tx, str) else tx * KIB,
                    "rx_b": rx if isinstance(rx, str) else rx * KIB,
                    "mb_s": speed,
                }
            )
        found["nvlinks"] = links
        return found

    def _pcie_rate(self, gpu):
        """PCIe throughput costs 20 ms a call: one GPU a tick takes its turn, the others repeat their last reading."""
        if self.slow_turn % max(1, len(self.gpus)) == gpu["facts"]["index"]:
            tx = self._read("nvmlDeviceGetPcieThroughput", gpu["handle"], 0)
            rx = self._read("nvmlDeviceGetPcieThroughput", gpu["handle"], 1)
            gpu["pcie"] = {"tx_b_s": scaled(tx, KIB), "rx_b_s": scaled(rx, KIB)}
        return gpu["pcie"]

    def _processes(self, handle, memory):
        """Processes on the GPU; the struct changed between drivers, so only plausible entries are taken."""
        total = None if isinstance(memory, str) else memory.total
        for name in ("_v3", "_v2", ""):
            found = self._read("nvmlDeviceGetComputeRunningProcesses" + name, handle)
            if not isinstance(found, str):
                break
        else:
            return []
        out = []
        for process in found:
            pid, used = getattr(process, "pid", 0), getattr(process, "usedGpuMemory", None)
            if not pid or pid < 0:
                continue
            plausible = used is not None and (total is None or used <= total)
            comm = self.host.read("/proc/%d/comm" % pid)
            entry = {"pid": pid, "memory_mib": used / float(KIB * KIB) if plausible else None}
            entry["name"] = (comm or "").strip()
            entry.update(self._job_of(pid))
            out.append(entry)
        return out

    def _job_of(self, pid):
        wanted = {"SLURM_JOB_ID": "slurm_job", "RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "world_size"}
        found = {}
        for item in (self.host.read("/proc/%d/environ" % pid) or "").split("\0"):
            key, _, value = item.partition("=")
            if key in wanted:
                found[wanted[key]] = value
        return found

    def _nics(self):
        """InfiniBand ports (counters in words of four bytes) and physical Ethernet ports."""
        out = []
        for device in self.host.list("/sys/class/infiniband"):
            for port in self.host.list("/sys/class/infiniband/%s/ports" % device):
                base = "/sys/class/infiniband/%s/ports/%s/" % (device, port)
                tx, rx = self._count(base + "counters/port_xmit_data"), self._count(base + "counters/port_rcv_data")
                state, rate = self.host.read(base + "state") or "", (self.host.read(base + "rate") or "").split()
                out.append(
                    {
                        "name": device if port == "1" else "%s/%s" % (device, port),
                        "tx_b": None if tx is None else 4 * tx,
                        "rx_b": None if rx is None else 4 * rx,
                        "gbps": number_of(rate[0]) if rate else None,
                        "active": "ACTIVE" in state if state else None,
                    }
                )
        for name in self.host.list("/sys/class/net"):
            base = "/sys/class/net/%s/" % name
            if not self.host.list(base + "device") or self.host.list(base + "device/infiniband"):
                continue  # virtual, or the IP face of an InfiniBand port counted above
            speed = self._count(base + "speed")
            out.append(
                {
                    "name": name,
                    "tx_b": self._count(base + "statistics/tx_bytes"),
                    "rx_b": self._count(base + "statistics/rx_bytes"),
                    "gbps": speed / 1000.0 if speed and speed > 0 else None,
                    "active": (self.host.read(base + "operstate") or "").strip() == "up",
                }
            )
        return out

    def _count(self, path):
        try:
            return int(self.host.read(path))
        except (TypeError, ValueError):
            return None

    def _load(self):
        words = (self.host.read("/proc/loadavg") or "").split()
        return number_of(words[0]) if words else None

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
            if command.get("do") == "restore":
                wanted = [int(i) for i in command.get("gpus", [])]
                kept = self._release(wanted, None)
                reason = "; ".join(kept)
                return {"state": "failed" if kept else "done", "gpus": {}, "reason": reason}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            return {"state": "failed", "gpus": {}, "reason": "the command is malformed: %r" % (error,)}
        return {"state": "failed", "gpus": {}, "reason": "this probe cannot do %r" % (command.get("do"),)}

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
        if not 0 <= index < len(self.gpus) or self.gpus[index]["handle"] is None:
            return None
        value = self._read("nvmlDeviceGetPowerManagementLimit", self.gpus[index]["handle"])
        return None if isinstance(value, str) else int(value)

    def _set_limit(self, index, milliwatts):
        """Set one limit; an empty text, or why not. The first form of the call: the second always claims success."""
        if not 0 <= index < len(self.gpus) or self.gpus[index]["handle"] is None:
            return "there is no such GPU on this node"
        facts, nvml = self.gpus[index]["facts"], self.host.nvml
        low, high = facts["power_limit_min_w"], facts["power_limit_max_w"]
        if not isinstance(low, str) and not low * 1000 <= milliwatts <= high * 1000:
            return "%d W is outside the %d to %d W that the board allows" % (milliwatts // 1000, low, high)
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(self.gpus[index]["handle"], milliwatts)
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


def word_of(value):
    """NVML's error number as the state of a reading."""
    if value in ERROR_UNSUPPORTED:
        return "unsupported"
    if value in ERROR_LOST:
        return "lost"
    return "absent" if value in ERROR_NOT_FOUND else "error"


def scaled(value, factor):
    return value if isinstance(value, str) else value * factor


def watts(milliwatts):
    return None if milliwatts is None else milliwatts / 1000.0


def number_of(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def text_of(value):
    """Text from NVML, which is bytes in older modules; None for what was not read."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) and value not in ("absent", "unsupported", "error", "lost") else None


def field_value(field):
    """A field value's number by its type, or the word for why there is none."""
    code = getattr(field, "nvmlReturn", 1)
    if code:
        return word_of(code)
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    return getattr(field.value, kinds.get(field.valueType, "ullVal"))


class Host(object):
    """The real node: what the probe may touch. Another host may stand in with the same methods."""

    def __init__(self, nvml, nvml_error=""):
        self.nvml, self.nvml_error = nvml, nvml_error

    def read(self, path):
        try:
            with open(path, "rb") as file:
                return file.read(65536).decode("utf-8", "replace")
        except (OSError, IOError):
            return None

    def list(self, path):
        import os

        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def hostname(self):
        import socket

        return socket.gethostname()

    def python(self):
        import sys

        return "%d.%d.%d" % sys.version_info[:3]

    def user(self):
        import getpass

        try:
            return getpass.getuser()
        except Exception:
            return "USER"

    def time(self):
        import time

        return time.time()

    def monotonic(self):
        import time

        return time.monotonic()

    def hook_sockets(self):
        """Sockets of training jobs under our own directory; others' are none of our business."""
        import os
        import stat

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

    def run(self, argv, timeout_s):
        """Run a program without a shell: (exit status, what it said)."""
        import subprocess

        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
            )
            return done.returncode, done.stdout.decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            return 124, "no answer within %d s" % timeout_s
        except OSError as error:
            return 127, str(error)
