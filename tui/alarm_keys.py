"""What the keys of the alarms do: the first press of any of them shows the list. Enter is the log's, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.act.alarm import Alarm, Shelved
from tui.screens.shelve import ShelvePanel
from tui.widgets.log import place_of

if TYPE_CHECKING:
    from tui.app import RacksideApp


def _chosen(app: RacksideApp) -> Alarm | Shelved | None:
    if not app.alarm_list.has_focus:
        app.show_pane("alarms")
        return None
    return app.alarm_list.chosen


def _may_decide(app: RacksideApp) -> bool:
    """A console that can never be armed is there to be looked at."""
    if app.control.arming.fixed_read_only:
        app.notify(f"{app.control.arming.why} It acknowledges nothing.", severity="warning", markup=False)
    return not app.control.arming.fixed_read_only


def acknowledge(app: RacksideApp) -> None:
    """The one under the cursor was seen."""
    chosen = _chosen(app)
    if isinstance(chosen, Alarm) and _may_decide(app):
        app.control.alarming.acknowledge([chosen.key])
        app.draw_lines()


def acknowledge_all(app: RacksideApp) -> None:
    """All that are listed were seen; what a filter hides was not."""
    if _chosen(app) is not None and _may_decide(app):
        app.control.alarming.acknowledge(app.alarm_list.shown)
        app.draw_lines()


def shelve(app: RacksideApp) -> None:
    """Ask for how long and why; what is shelved comes back."""
    chosen = _chosen(app)
    if chosen is None or not _may_decide(app):
        return
    if isinstance(chosen, Shelved):
        app.control.alarming.unshelve(chosen.key)
        app.draw_lines()
        return

    def shelved(answer: tuple[float, str] | None) -> None:
        if answer is not None:
            app.control.alarming.shelve(chosen.key, *answer)
            app.draw_lines()

    app.push_screen(ShelvePanel(chosen, app.plain), shelved)


def go_to(app: RacksideApp) -> None:
    """The racks' cursor to where it is, or to the first GPU of what the log tells of."""
    names = [n.name for n in app.control.cluster.nodes]
    if app.log_list.has_focus:
        if (place := place_of(app.log_list.chosen or {}, names)) is None:
            app.notify("This entry names no node.", severity="warning")
        else:
            app.racks.cursor = place
            app.show_pane("gpu")
        return
    chosen = _chosen(app)
    if not isinstance(chosen, Alarm):
        return
    if chosen.node not in names:
        app.notify("This alarm is of no node.", severity="warning")
        return
    number = names.index(chosen.node)
    rows = app.control.snapshot.nodes[number].rows
    app.racks.cursor = (number, rows.index(chosen.row) if chosen.row in rows else 0)
    app.show_pane("gpu")
