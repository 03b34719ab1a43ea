"""Links against their peak, as a list and as a matrix, from imitated nodes whose every rate is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from engine.telemetry.reading import decode
from engine.telemetry.snapshot import Snapshot
from engine.telemetry.store import Store
from tui.widgets.bundles import Key, bundled, look, measured
from tui.widgets.link_matrix import cells
from tui.widgets.links import links
from tui.widgets.plot import bar

Rate = Callable[[int, dict[str, Any]], float | None]
NVLINKS, GPUS = 2, 4


def node_links() -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for gpu in range(GPUS):
        out += [{"gpu": gpu, "kind": "nvlink", "name": f"NVLink {k}", "gb_s": 25.0} for k in range(NVLINKS)]
        out.append({"gpu": gpu, "kind": "pcie", "name": "PCIe", "gb_s": 64.0, "best_gb_s": 64.0})
    return out + [{"gpu": -1, "kind": "nic", "name": f"mlx5_{k}", "gb_s": 50.0} for k in range(GPUS)]


def busy(node: int, link: dict[str, Any]) -> float | None:
    """GB/s: NVLinks at 40 %, PCIe idle, ports busier from node to node; the last port of each node at 80 %."""
    return {"nvlink": 10.0, "pcie": 3.2}.get(link["kind"], 40.0 if link["name"] == "mlx5_3" else 10.0 + node)


def seen(nodes: int = 3, rate: Rate = busy, down: Iterable[tuple[int, int]] = ()) -> Snapshot:
    """A snapshot; `down` names links as (node, row in the node's list)."""
    store = Store([(f"n{i}", GPUS) for i in range(nodes)])
    for node in range(nodes):
        hello = {"hello": 1, "hostname": "h", "gpus": [{"index": k} for k in range(GPUS)]}
        store.apply(f"n{node}", decode(json.dumps(hello).encode()), 1.0)  # type: ignore[arg-type]
        told = [
            {**link, "state": "inactive" if (node, row) in down else "active"} for row, link in enumerate(node_links())
        ]
        rates = [None if (r := rate(node, link)) is None else 1000 * r for link in told]
        tick = {"tick": 1, "time": 1.0, "links": told, "rx_mb_s": rates, "tx_mb_s": rates}
        store.apply(f"n{node}", decode(json.dumps(tick).encode()), 1.0)  # type: ignore[arg-type]
    return store.publish(1.0)


def drawn(
    snapshot: Snapshot,
    node: str | None = "n0",
    wanted: str = "",
    size: tuple[int, int] = (100, 40),
    carried: dict[Key, str] | None = None,
    expected: dict[Key, float] | None = None,
    as_matrix: bool = False,
) -> list[str]:
    found = look(snapshot.links, node, carried or {}, expected or {})
    text = links(found, wanted, *size, True, as_matrix).plain
    return [row.rstrip() for row in text.rstrip("\n").split("\n")]


def test_a_bundle_is_the_sum_of_its_links() -> None:
    table = seen().links
    of = bundled(table, "n1")
    load = measured(of, table)
    assert [of.label(b, True) for b in (0, 1, 8)] == ["n1 GPU 0 nvlink", "n1 GPU 0 pcie", "n1 mlx5_0"]
    assert load.rx[0] == pytest.approx(NVLINKS * 10.0)
    assert load.share.tolist() == pytest.approx([0.4, 0.05] * GPUS + [0.22] * 3 + [0.8])
    everything = measured(bundled(table, None), table)
    assert np.nansum(everything.rx) == pytest.approx(np.nansum(table["rx_gb_s"])), "no link is lost, none counted twice"


def test_what_is_not_read_is_left_out_of_a_sum_and_all_of_it_is_not_known() -> None:
    table = seen(1, lambda node, link: None if link["name"] in ("NVLink 1", "mlx5_0") else 10.0).links
    load = measured(bundled(table, None), table)
    assert load.rx[0] == pytest.approx(10.0)
    assert np.isnan(load.share[8])


def test_the_list_is_sorted_by_share_and_the_70_per_cent_line_stands_in_its_bars() -> None:
    head, beside, first, *rest = drawn(seen())
    assert head == "Links of n0, GB/s each way"
    assert beside == "4 links idle beside 1 contended ones"
    assert first.split() == ["mlx5_3", "!##############|#....", "40.0/", "40.0", "of", "50"]
    assert [row.split()[0] for row in rest] == ["GPU"] * 4 + ["mlx5_0", "mlx5_1", "mlx5_2"] + ["GPU"] * 4
    assert rest[0].index("|") == first.index("|")


@pytest.mark.parametrize(("share", "expected"), [(0.0, ".......|.."), (0.5, "#####..|.."), (1.0, "#######|##")])
def test_a_bar_has_a_tick_at_its_line(share: float, expected: str) -> None:
    assert bar(share, 10, True, 0.7) == expected
    assert "|" not in bar(share, 10, True)
    assert bar(float("nan"), 10, True, 0.7) == " " * 10


def test_the_models_rate_stands_beside_the_measured_where_it_is_known() -> None:
    expected: dict[Key, float] = {("n0", 2): 33.25, ("n0", "mlx5_3"): 7.0}
    rows = drawn(seen(), expected=expected)
    assert rows[0].endswith("~ by the model")
    assert [row.split("~")[1] for row in rows[1:] if "~" in row] == ["7.0", "33.2"]
    assert "~" not in "".join(drawn(seen(), expected={("n1", 2): 1.0})), "of another node"
    assert "~" not in "".join(drawn(seen(), expected=expected, size=(40, 40))[1:]), "no room"


def test_groups_that_idle_beside_contended_ones_of_their_kind_are_named() -> None:
    carried: dict[Key, str] = {("n0", f"mlx5_{k}"): f"DP group {k}" for k in range(4)} | {("n0", 0): "TP group 0"}

    def rate(node: int, link: dict[str, Any]) -> float | None:
        return {"mlx5_3": 45.0, "mlx5_2": 20.0}.get(link["name"], 1.0)

    said = "DP group 0 and 1 more idle beside DP group 3"
    for as_matrix in (False, True):
        assert drawn(seen(rate=rate), carried=carried, as_matrix=as_matrix)[2] == said
    assert said not in drawn(seen(), carried=carried), "none of them is idle"
    assert said not in drawn(seen(rate=rate), carried={("n0", "mlx5_3"): "DP group 3", ("n0", 0): "TP group 0"})


def test_groups_are_named_where_there_is_room() -> None:
    carried: dict[Key, str] = {("n0", "mlx5_3"): "DP group 3", ("n0", 0): "TP group 0"}
    rows = drawn(seen(), carried=carried)
    assert rows[2].endswith("DP group 3")
    assert sum("group" in row for row in rows) == 2, "PCIe is nobody's"
    assert len(drawn(seen(), carried=carried, wanted="tp group")) == 2
    assert "No link here holds 'pp'" in drawn(seen(), carried=carried, wanted="pp")[1]


def test_links_that_are_down_are_said_in_the_list_and_marked_in_the_matrix() -> None:
    snapshot = seen(down=[(0, 1), (0, 3)])
    assert any(row.endswith("1 inactive") and row.startswith("GPU 0 nvlink") for row in drawn(snapshot))
    assert sum("x" in row for row in drawn(snapshot, as_matrix=True)[5:]) == 2


def test_the_matrix_of_a_node_has_a_row_a_gpu_and_a_column_a_link() -> None:
    rows = drawn(seen(down=[(0, 0)]), as_matrix=True)
    assert rows[0] == "Links of n0, share of peak"
    assert rows[3].split() == ["NVLink", "PCIe", "NIC"]
    assert rows[5].split() == ["ports", "20", "20", "20", "80!"]
    assert rows[6].split() == ["GPU", "0", "40x", "40", "5."]
    assert [row.split()[:2] for row in rows[7:]] == [["GPU", "1"], ["GPU", "2"], ["GPU", "3"]]


def test_the_matrix_of_all_nodes_has_a_row_a_node_the_most_loaded_first() -> None:
    def rate(node: int, link: dict[str, Any]) -> float | None:
        return None if link["kind"] == "pcie" else 5.0 * (node + 1)

    rows = drawn(seen(rate=rate), None, as_matrix=True)
    assert [row.split()[0] for row in rows[4:]] == ["n2", "n1", "n0"]
    assert rows[4].split() == ["n2", *["60"] * GPUS, *["30"] * GPUS], "what is not read is blank"


def test_a_narrow_matrix_says_tenths() -> None:
    rows = drawn(seen(down=[(2, 0)]), None, size=(30, 40), as_matrix=True)
    assert rows[2].startswith("tenths;")
    assert rows[5].split()[1:] == ["4444", "....", "222!"]
    assert [row for row in rows if "x" in row.split()[1]] == ["n2    x444   .... 222!"]
    assert all(len(row) <= 30 for row in rows[3:])


def test_only_the_rows_that_fit_are_drawn_and_the_others_counted() -> None:
    rows = drawn(seen(nodes=50), None, size=(80, 12), as_matrix=True)
    assert len(rows) == 12
    assert rows[-1] == "... and 44 more, less loaded"
    rows = drawn(seen(nodes=50), None, size=(80, 12))
    assert len(rows) == 12
    assert rows[-1] == "... and 591 more, less loaded"


def test_the_matrix_says_what_the_model_expects_of_its_columns() -> None:
    expected: dict[Key, float] = {("n0", 0): 5.0, ("n1", 0): 10.0, ("n0", "mlx5_0"): 40.0}
    rows = drawn(seen(), None, expected=expected, as_matrix=True)
    assert rows[5].split() == ["model", "15", "80!"]
    assert not [row for row in drawn(seen(), None, as_matrix=True) if row.startswith("model")]


def test_words_limit_the_matrix() -> None:
    rows = drawn(seen(), None, "n1 gpu 3", as_matrix=True)
    assert [row.split() for row in rows[4:]] == [["n1", "40", "5."]]
    assert "No link here holds 'n9'" in drawn(seen(), None, "n9", as_matrix=True)[1]


def test_what_does_not_change_is_found_once() -> None:
    first, second = seen(), seen()
    expected: dict[Key, float] = {("n0", 0): 1.0}
    one = look(first.links, None, {}, expected)
    again = look(first.links, None, {}, expected, one)
    assert again.bundles is one.bundles
    assert again.model is one.model
    assert look(first.links, None, {}, {}, one).model is not one.model
    assert look(first.links, "n0", {}, expected, one).bundles is not one.bundles
    assert look(second.links, None, {}, expected, one).bundles is not one.bundles, "other links"


def test_cells_hold_every_link_once() -> None:
    found = look(seen().links, "n0", {}, {})
    share = cells(found, found.holding("")).share
    assert np.count_nonzero(~np.isnan(share)) == len(node_links())


def test_without_links_something_is_said() -> None:
    snapshot = Store([("n0", 1)]).publish(1.0)
    for as_matrix in (False, True):
        assert "No link is read yet" in drawn(snapshot, None, as_matrix=as_matrix)[1]
