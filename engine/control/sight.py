"""What the guard sees of a cluster: live readings alone, each as far as it is believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.act.guard import Floats, Sight
from engine.control import load
from engine.control.watch import Watch, by_heat
from engine.profile import Cluster
from engine.telemetry.snapshot import NodeState, Snapshot


def sight_of(cluster: Cluster, snapshot: Snapshot, watch: Watch, slowdown_c: Floats, links: bool) -> Sight:
    """One row a GPU of the inventory. A node that is not live shows nothing: what was read before it fell silent is
    no reason to act. `slowdown_c` is the profile's, the board's own word wins; `links`: does a rule ask for them."""
    live = _live(cluster, snapshot)
    own = load.column(cluster, snapshot, "slowdown_c")
    found = watch.forecast()
    blank = np.where(live, 0.0, np.nan)
    found = replace(found, celsius=found.celsius + blank[:, None], reaches_s=np.where(live, found.reaches_s, np.inf))
    share = _link_share(cluster, snapshot) if links else np.full(cluster.gpus, np.nan)
    return Sight(
        time=snapshot.time,
        temperature_c=watch.believed_c(load.column(cluster, snapshot, "temperature_c")) + blank,
        slowdown_c=np.where(np.isnan(own), slowdown_c, own),
        held=by_heat(cluster, snapshot) & live,
        xid=(np.nan_to_num(load.column(cluster, snapshot, "xid")) > 0) & live,
        link_share=share + blank,
        forecast=found,
    )


def _live(cluster: Cluster, snapshot: Snapshot) -> np.typing.NDArray[np.bool_]:
    gpus = [cluster.type_of(node).gpus for node in cluster.nodes]
    return np.repeat([status.state is NodeState.LIVE for status in snapshot.nodes], gpus)


def _link_share(cluster: Cluster, snapshot: Snapshot) -> Floats:
    """Each GPU's busiest link as a share of its peak; a network port counts for every GPU of its node."""
    links, first, out = snapshot.links, 0, np.full(cluster.gpus, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.fmax(links["rx_gb_s"], links["tx_gb_s"]) / links["peak_gb_s"]
    names, of_gpu = np.asarray(links.node), np.asarray(links.gpu)
    for node, status in zip(cluster.nodes, snapshot.nodes, strict=True):
        gpus, mine = cluster.type_of(node).gpus, names == node.name
        for slot, row in enumerate(list(status.rows)[:gpus]):
            theirs = share[mine & ((of_gpu < 0) | (of_gpu == snapshot.gpus.index[row]))]
            known = theirs[~np.isnan(theirs)]
            out[first + slot] = known.max() if len(known) else np.nan
        first += gpus
    return out
