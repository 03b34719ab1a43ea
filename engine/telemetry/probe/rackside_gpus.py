"""The probe's eyes on GPUs: NVML through the module that the host brings. Python 3.6 or newer, standard library only.

A reading is a number, or one of the words absent, unsupported, error, lost: never 0 for what was not read.
"""

import collections

from rackside_values import field_value, is_number, mega, number_or_none, rounded, scaled, text_of, total, word_of

MAX_NVLINKS = 18
HEALTH_TICKS, PROCESS_TICKS = 10, 5
KIB = 1024
MIB = 1024.0 * 1024.0
PCIE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # payload of a lane in one direction

# NVML's numbers, the same in every driver; pynvml may be older than the driver and lack the names.
FI_MEMORY_TEMP, FI_NVLINK_SPEED, FI_POWER_INSTANT = 82, 90, 186
FI_NVLINK_TX, FI_NVLINK_RX = 138, 139
FI_NVLINK_ERRORS = (161, 162, 163)  # replays, recoveries, CRC errors
FI_PCIE_TX, FI_PCIE_RX = 197, 198
FI_HELD_POWER, FI_HELD_HEAT, FI_HELD_SW_HEAT, FI_HELD_HW_HEAT, FI_HELD_BRAKE = 74, 75, 269, 270, 271  # nanoseconds
FI_HEALTH = collections.OrderedDict(
    [
        ("ecc_corrected", (3,)),
        ("ecc_uncorrected", (4,)),
        ("pcie_replays", (94,)),
        ("rows_remapped", (142, 143)),
        ("remap_pending", (144,)),
        ("remap_failed", (145,)),
    ]
)
EVENT_XID = 8
POWER_BITS, HEAT_BITS = 0x4 | 0x80, 0x8 | 0x20 | 0x40

STEADY = collections.OrderedDict(
    [
        ("power_limit_w", ("nvmlDeviceGetPowerManagementLimit", (), 1e-3)),
        ("sm_clock_mhz", ("nvmlDeviceGetClockInfo", (1,), 1)),
        ("memory_clock_mhz", ("nvmlDeviceGetClockInfo", (2,), 1)),
        ("margin_c", ("nvmlDeviceGetMarginTemperature", (), 1)),
        ("energy_j", ("nvmlDeviceGetTotalEnergyConsumption", (), 1e-3)),
    ]
)
"""Metrics that are one call each: its name, its arguments after the handle, and what makes our unit of its value."""


class Gpu(object):
    """One GPU: its handle (None: it never answered), its facts, and what the last tick left to compare with."""

    def __init__(self, handle, facts, links):
        self.handle, self.facts, self.links = handle, facts, links
        self.lost = handle is None
        self.instant = True  # the driver tells power as it is now, not only its average
        self.counters = {}  # name -> (when, value)
        self.fields = {}
        self.pcie = None
        self.forget_samples()

    def forget_samples(self):
        self.watts, self.held, self.held_by = [], 0, [0, 0]


class Gpus(object):
    """The GPUs of this node."""

    def __init__(self, host):
        self.host, self.all, self.events = host, [], None
        self.turn, self.told, self.links_told, self.xids = 0, {}, None, []
        self.processes_told, self.jobs = None, {}

    def answering(self, index):
        """The GPU of that index, if it answers."""
        gpu = self.all[index] if 0 <= index < len(self.all) else None
        return None if gpu is None or gpu.handle is None else gpu

    def read(self, name, *args):
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

    # What does not change.

    def discover(self):
        """Start NVML and find the GPUs; a sentence when there are none."""
        self.__init__(self.host)
        trouble = self._start()
        if trouble:
            return trouble
        count = self.read("nvmlDeviceGetCount")
        self.all = [self._describe(i) for i in range(count)] if not isinstance(count, str) else []
        if not self.all:
            return "the NVIDIA driver answers but shows no GPU"
        self.xids = [None] * len(self.all)
        self._watch_events()
        return None

    def _start(self):
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

    def driver(self):
        return text_of(self.read("nvmlSystemGetDriverVersion")) if self.all else None

    def _describe(self, index):
        handle = self.read("nvmlDeviceGetHandleByIndex", index)
        if isinstance(handle, str):
            return Gpu(None, {"index": index, "lost": True}, [])
        pci = self.read("nvmlDeviceGetPciInfo", handle)
        bus = text_of(getattr(pci, "busId", None)) if not isinstance(pci, str) else None
        limits = self.read("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        low, high = (limits, limits) if isinstance(limits, str) else (scaled(limits[0], 1e-3), scaled(limits[1], 1e-3))
        memory = self.read("nvmlDeviceGetMemoryInfo", handle)
        persistence = self.read("nvmlDeviceGetPersistenceMode", handle)
        facts = {
            "index": index,
            "name": text_of(self.read("nvmlDeviceGetName", handle)),
            "uuid": text_of(self.read("nvmlDeviceGetUUID", handle)),
            "bus_id": bus,
            "memory_total_mib": memory if isinstance(memory, str) else memory.total / MIB,
            "power_limit_min_w": low,
            "power_limit_max_w": high,
            "power_limit_default_w": scaled(self.read("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1e-3),
            "sm_clock_max_mhz": self.read("nvmlDeviceGetMaxClockInfo", handle, 1),
            "shutdown_c": self.read("nvmlDeviceGetTemperatureThreshold", handle, 0),
            "slowdown_c": self.read("nvmlDeviceGetTemperatureThreshold", handle, 1),
            "persistence": None if isinstance(persistence, str) else bool(persistence),
            "mig": self._mig(handle),
        }
        facts.update(self.host.place_of(bus))
        return Gpu(handle, facts, self._links_of(handle))

    def _mig(self, handle):
        """The MIG instances of a GPU; none when it is not in MIG mode."""
        mode = self.read("nvmlDeviceGetMigMode", handle)
        if isinstance(mode, str) or not mode[0]:
            return []
        most, out = self.read("nvmlDeviceGetMaxMigDeviceCount", handle), []
        for place in range(0 if isinstance(most, str) else most):
            part = self.read("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            if isinstance(part, str):
                continue
            memory = self.read("nvmlDeviceGetMemoryInfo", part)
            name = text_of(self.read("nvmlDeviceGetName", part)) or ""
            out.append(
                {
                    "name": name.rpartition("MIG ")[2],
                    "gpu_instance": number_or_none(self.read("nvmlDeviceGetGpuInstanceId", part)),
                    "compute_instance": number_or_none(self.read("nvmlDeviceGetComputeInstanceId", part)),
                    "memory_total_mib": None if isinstance(memory, str) else memory.total / MIB,
                    "memory_used_mib": None if isinstance(memory, str) else memory.used / MIB,
                }
            )
        return out

    def _links_of(self, handle):
        """The NVLinks that a GPU has, and what each leads to."""
        links = []
        for link in range(MAX_NVLINKS):
            if isinstance(self.read("nvmlDeviceGetNvLinkState", handle, link), str):
                break
            kind = self.read("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            far = self.read("nvmlDeviceGetNvLinkRemotePciInfo", handle, link) if kind == 0 else None
            to = "NVSwitch" if kind == 2 else text_of(getattr(far, "busId", None))
            links.append((link, to))
        return links

    # What changes.

    def sample(self):
        """Power, and where the driver keeps no time counters what holds the clock: read several times a tick."""
        for gpu in self.all:
            if gpu.handle is None:
                continue
            watts = self._watts(gpu)
            if not isinstance(watts, str):
                gpu.watts.append(watts)
            if "held_by_power" not in gpu.counters:
                reasons = self._reasons(gpu)
                if not isinstance(reasons, str):
                    gpu.held += 1
                    gpu.held_by[0] += bool(reasons & POWER_BITS)
                    gpu.held_by[1] += bool(reasons & HEAT_BITS)

    def _watts(self, gpu):
        if gpu.instant:
            values = self.read("nvmlDeviceGetFieldValues", gpu.handle, [FI_POWER_INSTANT])
            value = "error" if isinstance(values, str) or not values else field_value(values[0])
            if not isinstance(value, str):
                return value * 1e-3
            gpu.instant = value == "lost"
        return scaled(self.read("nvmlDeviceGetPowerUsage", gpu.handle), 1e-3)

    def _reasons(self, gpu):
        reasons = self.read("nvmlDeviceGetCurrentClocksEventReasons", gpu.handle)
        if isinstance(reasons, str):
            reasons = self.read("nvmlDeviceGetCurrentClocksThrottleReasons", gpu.handle)
        return reasons

    def tick(self, now):
        """One sample of everything, as the fields of a tick's record. `now` from a clock that never steps back."""
        health = self.turn % HEALTH_TICKS == 0
        rows, links = [], []
        for slot, gpu in enumerate(self.all):
            fields = self._fields(gpu, health)
            rows.append(self._row(gpu, fields, now))
            links += self._link_rows(slot, gpu, fields, now)
            gpu.forget_samples()
        names = list(rows[0]) if rows else []
        columns = {name: [row.get(name, "absent") for row in rows] for name in names}
        if health:
            self._health(columns)
        self._take_events(columns)
        record = {"gpus": columns, "lost": [name_of(slot, gpu) for slot, gpu in enumerate(self.all) if gpu.lost]}
        if self.turn % PROCESS_TICKS == 0:
            processes = [entry for slot, gpu in enumerate(self.all) for entry in self._processes(slot, gpu)]
            if processes != self.processes_told:
                record["processes"] = self.processes_told = processes
        self.turn += 1
        return record, links

    def _row(self, gpu, fields, now):
        if gpu.handle is None:
            return dict.fromkeys(["temperature_c", "power_w", "power_max_w", "utilization_pct"], "lost")
        utilisation = self.read("nvmlDeviceGetUtilizationRates", gpu.handle)
        memory = self.read("nvmlDeviceGetMemoryInfo", gpu.handle)
        temperature = self.read("nvmlDeviceGetTemperature", gpu.handle, 0)
        gpu.lost = temperature == "lost"
        watts = gpu.watts or [self._watts(gpu)]
        told = isinstance(watts[0], str)
        row = {
            "temperature_c": temperature,
            "memory_temperature_c": fields.get(FI_MEMORY_TEMP, "unsupported"),
            "power_w": watts[0] if told else round(sum(watts) / len(watts), 2),
            "power_max_w": watts[0] if told else round(max(watts), 2),
            "utilization_pct": utilisation if isinstance(utilisation, str) else utilisation.gpu,
            "memory_used_mib": memory if isinstance(memory, str) else round(memory.used / MIB, 1),
            "throttle": self._reasons(gpu),
        }
        for name, (call, args, factor) in STEADY.items():
            row[name] = rounded(scaled(self.read(call, gpu.handle, *args), factor))
        row["held_by_power"], row["held_by_heat"] = self._held(gpu, fields, now)
        return row

    def _held(self, gpu, fields, now):
        """The tick's shares in which power and heat held the clock: by the driver's time counters, else by samples."""
        counts = [fields.get(name) for name in (FI_HELD_POWER, FI_HELD_BRAKE)]
        power = sum(c for c in counts if is_number(c)) if is_number(counts[0]) else None
        whole, parts = fields.get(FI_HELD_HEAT), [fields.get(name) for name in (FI_HELD_SW_HEAT, FI_HELD_HW_HEAT)]
        known = [c for c in [whole, sum(c for c in parts if is_number(c))] if is_number(c)]
        if power is not None and known:
            shares = [self._rate(gpu, "held_by_power", power, now), self._rate(gpu, "held_by_heat", max(known), now)]
            return [None if s is None else round(min(1.0, s * 1e-9), 3) for s in shares]
        if not gpu.held:
            return ["unsupported", "unsupported"]
        return [round(count / float(gpu.held), 3) for count in gpu.held_by]

    def _rate(self, gpu, name, value, now):
        """A counter's growth a second; None when it is new or did not grow."""
        before = gpu.counters.get(name)
        gpu.counters[name] = (now, value)
        if before is None or now <= before[0] or value < before[1]:
            return None
        return (value - before[1]) / (now - before[0])

    def _fields(self, gpu, health):
        """Everything that NVML gives as field values, in one call: {field or (field, link): number or word}."""
        if gpu.handle is None:
            return {}
        wanted = [FI_MEMORY_TEMP, FI_PCIE_TX, FI_PCIE_RX, FI_NVLINK_SPEED]
        wanted += [FI_HELD_POWER, FI_HELD_HEAT, FI_HELD_SW_HEAT, FI_HELD_HW_HEAT, FI_HELD_BRAKE]
        wanted += [(field, link) for link, _ in gpu.links for field in (FI_NVLINK_TX, FI_NVLINK_RX)]
        if health:
            wanted += [field for fields in FI_HEALTH.values() for field in fields]
            wanted += [(field, link) for link, _ in gpu.links for field in FI_NVLINK_ERRORS]
        values = self.read("nvmlDeviceGetFieldValues", gpu.handle, wanted)
        if isinstance(values, str) or len(values) < len(wanted):
            return {}
        gpu.fields = dict(zip(wanted, (field_value(v) for v in values)))  # noqa: B905 - strict= is younger than the nodes
        return gpu.fields

    def _health(self, columns):
        """Columns that seldom change: told when they do."""
        for name, fields in FI_HEALTH.items():
            column = [total([gpu.fields.get(f, "absent") for f in fields]) for gpu in self.all]
            if self.told.get(name) != column:
                self.told[name] = columns[name] = column

    def _link_rows(self, slot, gpu, fields, now):
        """(facts, received MB/s, sent MB/s, errors or None) of a GPU's NVLinks and its PCIe port."""
        out = []
        speed = fields.get(FI_NVLINK_SPEED)
        for link, to in gpu.links:
            active = self.read("nvmlDeviceGetNvLinkState", gpu.handle, link)
            facts = {"gpu": slot, "kind": "nvlink", "name": "NVLink %d" % link, "to": self._far(to)}
            facts["state"] = "unknown" if isinstance(active, str) else "active" if active else "inactive"
            facts["gb_s"] = speed / 1000.0 if is_number(speed) and speed > 0 else None
            rates = [
                mega(self._counted(gpu, (field, link), fields, now, KIB)) for field in (FI_NVLINK_RX, FI_NVLINK_TX)
            ]
            errors = total([fields.get((field, link), "absent") for field in FI_NVLINK_ERRORS])
            out.append((facts, rates[0], rates[1], errors if is_number(errors) else None))
        if gpu.handle is not None:
            out.append(self._pcie_row(slot, gpu, fields, now))
        return out

    def _far(self, to):
        """An NVLink's other end by the name a person uses."""
        for slot, gpu in enumerate(self.all):
            if to and gpu.facts.get("bus_id") == to:
                return "GPU %d" % slot
        return to

    def _counted(self, gpu, key, fields, now, unit):
        value = fields.get(key)
        rate = self._rate(gpu, key, value, now) if is_number(value) else None
        return None if rate is None else rate * unit

    def _pcie_row(self, slot, gpu, fields, now):
        gen = self.read("nvmlDeviceGetMaxPcieLinkGeneration", gpu.handle)
        widths = [self.read("nvmlDeviceGet%sPcieLinkWidth" % which, gpu.handle) for which in ("Curr", "Max")]
        lane = PCIE_GB_S.get(gen)
        now_gb_s, best = [lane * w if lane and is_number(w) else None for w in widths]
        # The width tells a bad seat; the generation drops by itself when the port is idle.
        facts = {"gpu": slot, "kind": "pcie", "name": "PCIe", "state": "active"}
        facts.update(gb_s=now_gb_s or best, best_gb_s=best)
        if is_number(fields.get(FI_PCIE_TX)) and is_number(fields.get(FI_PCIE_RX)):
            rates = [mega(self._counted(gpu, field, fields, now, 1)) for field in (FI_PCIE_RX, FI_PCIE_TX)]
        else:
            rates = self._pcie_rates(slot, gpu)
        return facts, rates[0], rates[1], None

    def _pcie_rates(self, slot, gpu):
        """PCIe throughput costs 20 ms a call: one GPU a tick takes its turn, the others repeat their last reading."""
        if self.turn % len(self.all) == slot or gpu.pcie is None:
            read = [self.read("nvmlDeviceGetPcieThroughput", gpu.handle, which) for which in (1, 0)]
            gpu.pcie = [None if isinstance(value, str) else mega(value * KIB) for value in read]
        return gpu.pcie

    def _processes(self, slot, gpu):
        """Processes on a GPU; the struct changed between drivers, so only plausible entries are taken."""
        if gpu.handle is None:
            return
        memory = self.read("nvmlDeviceGetMemoryInfo", gpu.handle)
        total = None if isinstance(memory, str) else memory.total
        for version in ("_v3", "_v2", ""):
            found = self.read("nvmlDeviceGetComputeRunningProcesses" + version, gpu.handle)
            if not isinstance(found, str):
                break
        else:
            return
        for process in found:
            pid, used = getattr(process, "pid", 0), getattr(process, "usedGpuMemory", None)
            if not pid or pid < 0:
                continue
            plausible = used is not None and (total is None or used <= total)
            # In steps of 64 MiB, so that a list is not told again for every buffer.
            entry = {"gpu": slot, "pid": pid, "memory_mib": int(used / MIB / 64) * 64.0 if plausible else None}
            if pid not in self.jobs or self.turn % (6 * PROCESS_TICKS) == 0:
                self.jobs[pid] = self.host.process(pid)
            entry.update(self.jobs[pid])
            yield entry

    # Critical events.

    def _watch_events(self):
        self.events = self.read("nvmlEventSetCreate")
        if isinstance(self.events, str):
            self.events = None
            return
        for gpu in self.all:
            if gpu.handle is not None:
                self.read("nvmlDeviceRegisterEvents", gpu.handle, EVENT_XID, self.events)

    def _take_events(self, columns):
        """The last XID of each GPU, told when there is a new one."""
        fresh = False
        for _ in range(16):
            event = self.read("nvmlEventSetWait_v2", self.events, 0) if self.events is not None else "absent"
            if isinstance(event, str):
                break
            index = self.read("nvmlDeviceGetIndex", event.device)
            if is_number(index) and index < len(self.xids):
                self.xids[index], fresh = event.eventData, True
        if fresh:
            columns["xid"] = list(self.xids)


def name_of(slot, gpu):
    return gpu.facts.get("bus_id") or "index %d" % slot
