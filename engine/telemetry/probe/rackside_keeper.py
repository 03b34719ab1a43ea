"""Holds limits of AMD boards, where another program reads them: the probe's commands and leases on the kernel's files.

Python 3.6 or newer. Power caps are read in hwmon (power1_cap, in microwatts; the kernel's amdgpu documentation) and set
there by root, by others through `sudo -n amd-smi set` or rocm-smi. Clocks are held by performance determinism, whose
highest clock pp_dpm_sclk tells. A board is known by its PCI address; the console tells which index it gives each.
"""

import os

import rackside_probe
from rackside_leases import CLOCK_SLACK_MHZ, LOOK_S, LOOKS, UNREAD, Board, kept_other
from rackside_probe import Probe

SYS = os.environ.get("RACKSIDE_SYS", "/sys")
AMD = "0x1002"
TOOLS = (
    (
        "amd-smi",
        ("set", "-g", "{bus}", "--power-cap", "{value}"),
        ("set", "-g", "{bus}", "--perf-determinism", "{value}"),
        ("reset", "-g", "{bus}", "--perf-determinism"),
    ),
    (
        "rocm-smi",
        ("-d", "{card}", "--setpoweroverdrive", "{value}", "--autorespond", "y"),
        ("-d", "{card}", "--setperfdeterminism", "{value}", "--autorespond", "y"),
        ("-d", "{card}", "--resetperfdeterminism"),
    ),
)
POWER, CLOCK, RESET = 1, 2, 3
SUDOERS = "'%s ALL=(root) NOPASSWD: {0} set -g * --power-cap *, {0} set -g * {1} *, {0} reset -g * {1}'".format(
    "/opt/rocm/bin/amd-smi", "--perf-determinism"
)


class Card(object):
    """An AMD board: its PCI address, its folder in /sys, its place among the boards of its kind."""

    def __init__(self, host, bus, folder, place):
        self.host, self.bus, self.folder, self.place = host, bus, folder, place
        hwmon = host.list(folder + "/hwmon")
        self.hwmon = "%s/hwmon/%s" % (folder, hwmon[0]) if hwmon else None
        self.facts = {"uuid": None, "bus_id": bus}

    def microwatts(self, name):
        text = self.host.read("%s/%s" % (self.hwmon, name)) if self.hwmon else None
        return int(text) if text and text.strip().isdigit() else None

    def highest_mhz(self):
        """The highest clock of the board's table, such as `1: 1700Mhz *`."""
        found = [line.partition(":")[2].strip().rstrip("*").strip() for line in self._table()]
        clocks = [int(w[:-3]) for w in found if w.lower().endswith("mhz") and w[:-3].isdigit()]
        return max(clocks) if clocks else None

    def _table(self):
        return (self.host.read(self.folder + "/pp_dpm_sclk") or "").splitlines()

    def clock_mhz(self):
        hertz = self.microwatts("freq1_input")
        return None if hertz is None else hertz // 1000000


class Cards(object):
    """The boards by the console's indexes, once it has told them."""

    def __init__(self, host):
        self.host, self.all, self.jobs, self.of = host, [], {}, {}

    def discover(self):
        folders = {}
        for name in self.host.list(SYS + "/bus/pci/devices"):
            folder = "%s/bus/pci/devices/%s" % (SYS, name)
            if (self.host.read(folder + "/vendor") or "").strip() == AMD and self.host.list(folder + "/hwmon"):
                folders[name.lower()] = folder
        self.all = [Card(self.host, bus, folders[bus], place) for place, bus in enumerate(sorted(folders))]
        self.of = dict(enumerate(self.all))
        return None if self.all else "the kernel shows no AMD GPU"

    def number(self, boards):
        """Take the console's indexes: {index: PCI address}."""
        known = {card.bus: card for card in self.all}
        self.of = {int(index): known[bus.lower()] for index, bus in boards.items() if bus.lower() in known}

    def answering(self, index):
        return self.of.get(index)


class CardBoard(Board):
    def index_of(self, lease):
        found = [index for index, card in self.gpus.of.items() if card.bus == lease["board"]]
        return found[0] if found else None

    def board(self, index):
        card = self.gpus.answering(index)
        return None if card is None else card.bus

    def tool(self, card, which, value, what):
        """Run the vendor's tool as root; an empty text, or why it was not done."""
        said = "neither amd-smi nor rocm-smi is there"
        for words in TOOLS:
            name = words[0]
            line = [w.format(bus=card.bus, card=card.place, value=value) for w in words[which]]
            root = [] if self.host.is_root() else ["sudo", "-n"]
            # Some releases ask whether the warranty's end is accepted.
            status, output = self.host.run([*root, name, *line], 20.0, b"y\n")
            if status == 0:
                return ""
            if status != 127 and "command not found" not in output:
                said = "%s says: %s" % (name, " ".join(output.split())[-160:] or "exit %s" % status)
                break
        if not self.host.is_root():
            return "this user may not %s: %s; allow it with the sudoers line %s" % (
                what,
                said,
                SUDOERS % self.host.user(),
            )
        return said


class CardPower(CardBoard):
    """Power caps in mW."""

    name = "power"

    def now(self, index):
        card = self.gpus.answering(index)
        value = None if card is None else card.microwatts("power1_cap")
        return None if value is None else value // 1000

    def put(self, index, milliwatts):
        card = self.gpus.answering(index)
        if card is None:
            return "there is no such AMD GPU on this node"
        if milliwatts is None:
            return UNREAD
        low, high = card.microwatts("power1_cap_min"), card.microwatts("power1_cap_max")
        if not high:
            return "this board has no power cap of its own: the other half of its module holds it"
        if not (low or 0) <= milliwatts * 1000 <= high:
            return "%d W is outside the %d to %d W that the board allows" % (
                milliwatts // 1000,
                (low or 0) // 1000000,
                high // 1000000,
            )
        path = card.hwmon + "/power1_cap"
        if not (self.host.is_root() and self.host.write(path, "%d" % (milliwatts * 1000))):
            refused = self.tool(card, POWER, milliwatts // 1000, "set power caps")
            if refused:
                return refused
        after = self.now(index)
        if after is None or abs(after - milliwatts) >= 1000:
            return kept_other(milliwatts, after)
        return ""

    def ours(self, index, lease):
        now = self.now(index)
        return now is not None and any(abs(now - value) < 1000 for value in [lease["ours"]] + lease["steps"])

    def told(self, value):
        return None if value is None else value / 1000.0


class CardClock(CardBoard):
    """Highest SM clock in MHz, None where none is held."""

    name = "clock"

    def __init__(self, gpus, host):
        CardBoard.__init__(self, gpus, host)
        self.locked = {}

    def now(self, index):
        return self.locked.get(index)

    def put(self, index, mhz):
        card = self.gpus.answering(index)
        if card is None:
            return "there is no such AMD GPU on this node"
        most = card.highest_mhz()
        if mhz is not None and most and not 0 < mhz <= most:
            return "%d MHz is outside the 1 to %d MHz that the board allows" % (mhz, most)
        refused = self.tool(card, RESET if mhz is None else CLOCK, mhz, "hold clocks")
        if refused:
            return refused
        self.locked[index] = mhz
        for _ in range(LOOKS if mhz is not None else 0):
            now = card.clock_mhz()
            if now is None or now <= mhz + CLOCK_SLACK_MHZ:
                return ""
            self.host.wait(LOOK_S)
        return "" if mhz is None else "the driver took %d MHz and the clock still is %s MHz" % (mhz, card.clock_mhz())

    def ours(self, index, lease):
        return True  # nobody can tell; what is not there is reset without harm

    def told(self, value):
        return None if value is None else float(value)


class Keeper(Probe):
    """The probe's commands without its readings."""

    gpus_of = Cards
    kinds = (CardPower, CardClock)

    def _discover(self):
        self.trouble = self.gpus.discover()

    def _tick(self):
        self.host.alive()

    def _act(self, command):
        boards = command.get("boards")
        if isinstance(boards, dict):
            if self.trouble:
                self._discover()
            self.gpus.number(boards)
        return Probe._act(self, command)

    def _may(self):
        """As root the kernel's files; else what sudo allows."""
        if self.host.is_root():
            return "yes, as root"
        for words in TOOLS:
            line = [words[0]] + [w.format(bus="0000:00:00.0", card=0, value=100) for w in words[POWER]]
            status, said = self.host.run(["sudo", "-n", "-l", *line], 10.0)
            if status == 0:
                return "yes, by sudo"
        return "no: %s" % (said.strip()[-120:] or "sudo refuses")


def main(stdin, stdout, host, interval_s=1.0, console=""):
    """As the probe's."""
    return rackside_probe.main(stdin, stdout, host, interval_s, console, Keeper)
