"""The file of a recording: one SQLite database in WAL mode, laid out so.

    meta    key, value                    format, cluster (its name), inventory (JSON, without addresses and keys)
    gpu     row, node, slot               the rows of every array
    second  tick, time, data              the last minute, a row a second: nothing written is lost by a kill
    minute  id, start, end, ticks, step_s, times     what is older; step_s > 0: thinned, else every tick
    block   minute, metric, part, data    one metric of 1,024 GPUs (part 0: the first) in one minute
    rate    start, end, data              what single links carried in ten seconds, or in those that are running
    event   id, time, kind, subject, data           what else happened, as JSON

Times are unix seconds; `times` is zlib over 64-bit floats. A value is a 16-bit integer times its metric's step (STEPS);
-32768: nothing was read. `data` of `second` is zlib over (metric, GPU); that of `block` as `packing` says: (tick, GPU),
or once thinned (3, bin, GPU): the mean of each bin, and how far its least and largest value lie below and above. That
of `rate` is zlib over (received and sent, link), means in steps of 0.1 GB/s, the links of all nodes one after the other
as the last `links` events list them; where minutes are thinned, one such row in six is left.

Events: `node` (state, and what it said of itself), `facts` (its GPUs), `processes` (a list for each GPU), `links`
(lists of their GPUs, kinds, names, states, ends and peaks), `errors` (of these links, since the driver started), `job`
(all of a job's status), `step` (the newest step of a second), `alarm` (raised, returned, acknowledged, shelved,
unshelved), `ticket` (an action at one stage). `subject` is the node, the job, the alarm's key or the action's id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Shorts = npt.NDArray[np.int16]

FORMAT, READ = "3", ("2", "3")
"""What is written, and what can be read: 2 has no single links and no processes."""
STEPS = {
    "temperature_c": 0.5,
    "memory_temperature_c": 0.5,
    "power_w": 0.1,
    "power_limit_w": 0.1,
    "sm_clock_mhz": 1.0,
    "utilization_pct": 1.0,
    "memory_used_mib": 32.0,
    "throttle": 1.0,
    "link_rx_gb_s": 0.1,
    "link_tx_gb_s": 0.1,
}
"""What is recorded, and the smallest step of each. Links are those of a GPU to other GPUs, added up."""
LINKS = {"link_rx_gb_s": "rx_gb_s", "link_tx_gb_s": "tx_gb_s"}
NOTHING = -32768
MINUTE_TICKS = 60
PART = 1024
BIN_S = 10.0
"""Bins of what is thinned, and of what links carry."""
RATE_STEP, RATES_LEFT = 0.1, 6
"""GB/s, and how many rows of `rate` make the minute of which one outlives the thinning."""

TABLES = """
create table meta (key text primary key, value text not null);
create table gpu (row integer primary key, node text not null, slot integer not null);
create table second (tick integer primary key, time real not null, data blob not null);
create table minute (
    id integer primary key, start real not null, end real not null, ticks integer not null, step_s real not null,
    times blob not null
);
create index minute_end on minute (end);
create table block (
    minute integer not null, metric text not null, part integer not null, data blob not null,
    primary key (minute, metric, part)
);
create table rate (start real primary key, end real not null, data blob not null);
create table event (
    id integer primary key, time real not null, kind text not null, subject text not null default '', data text not null
);
create index event_time on event (time);
create index event_kind on event (kind, subject, time);
"""


class RecordError(Exception):
    """A recording that cannot be written or read. The text is a sentence."""
