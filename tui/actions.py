"""Every action of the console, once: key bindings, footer, palette and help are all made from this list."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KeyAction:
    """`id` is what a key map names and what the app runs (action_<id>); `footer` is its short name there or empty."""

    id: str
    keys: str
    title: str
    help: str
    group: str
    footer: str = ""


ACTIONS = (
    KeyAction("throttle", "t", "Throttle", "Power limit or clock of the GPU, node or rack under the cursor.", "Act", "Throttle"),
    KeyAction("microbatch", "m", "Microbatch", "Halve, double or set the job's microbatch; the global batch stays.", "Act", "Microbatch"),
    KeyAction("rebalance", "r", "Rebalance", "Move microbatches from hot ranks to cold ones; the total stays.", "Act", "Rebalance"),
    KeyAction("pause", "p", "Pause / resume", "Let the job wait for a time, or go on; without a hook, stop it.", "Act"),
    KeyAction("undo", "u", "Undo", "Put back what the last action changed.", "Act", "Undo"),
    KeyAction("arm", "a", "Arm / disarm", "Let actions be confirmed for five minutes, or end that at once.", "Act", "Arm"),
    KeyAction("pane_gpu", "1", "GPU", "The selected GPU: numbers, history, processes.", "See"),
    KeyAction("pane_links", "2", "Links", "Links of the selected node against their peak.", "See"),
    KeyAction("pane_plans", "3", "Plans", "Plans for the job's model side by side; f finds all.", "See"),
    KeyAction("search_plans", "f", "Find plans", "All plans for the job's model: points, table, pins, export.", "See"),
    KeyAction("pane_alarms", "4", "Alarms and actions", "All alarms, shelved ones, and this session's actions.", "See"),
    KeyAction("acknowledge", "space", "Alarm: seen", "Acknowledge the alarm under the cursor of pane 4.", "Alarms"),
    KeyAction("acknowledge_all", "asterisk", "Alarms: all seen", "Acknowledge every alarm of the list.", "Alarms"),
    KeyAction("shelve", "z", "Alarm: shelve", "Keep it off the list for a time, with a reason; or bring it back.", "Alarms"),
    KeyAction("go_to_alarm", "enter", "Alarm: go there", "Put the racks' cursor where the alarm is, or what pane 6 tells of.", "Alarms"),
    KeyAction("pane_jobs", "5", "Jobs", "The job against its model, stragglers, what actions would do.", "See"),
    KeyAction("pane_log", "6", "Log", "What every console, command and guard did on this cluster.", "See"),
    KeyAction("next_pane", "tab", "Next pane", "The next of the six panes.", "See"),
    KeyAction("metric", "c", "Colour by", "Colour the racks by the next metric.", "See"),
    KeyAction("zoom_in", "plus", "Closer", "Draw the racks larger: nodes, GPUs, figures.", "See"),
    KeyAction("zoom_out", "minus", "Farther", "Draw the racks smaller: a character a GPU, or a node.", "See"),
    KeyAction("filter", "slash", "Filter", "Limit links, alarms and log to those that hold some words.", "See"),
    KeyAction("go_to", "g", "Go to", "Put the cursor on a node or a GPU by name: n03, n03:5.", "See"),
    KeyAction("hottest", "x", "Hottest GPU", "Put the cursor on the hottest GPU.", "See"),
    KeyAction("next_job", "s", "Next job", "Select the next job: m and r act on it.", "See"),
    KeyAction("links_scope", "n", "Links: node or all", "Links of the selected node, or of all nodes.", "See"),
    KeyAction("links_view", "v", "Links: list or matrix", "Links as a list, or as a matrix of nodes or GPUs.", "See"),
    KeyAction("record", "R", "Record", "Write what is seen here to a file of this folder, or end that.", "Console"),
    KeyAction("copy", "y", "Copy", "Copy what this pane shows to the clipboard, over SSH, too.", "Console"),
    KeyAction("help", "question_mark", "Help", "What the keys do.", "Console", "Help"),
    KeyAction("leave", "q", "Quit", "Leave; limits that this console holds are given back.", "Console", "Quit"),
)  # fmt: skip

REPLAY_ACTIONS = (
    KeyAction("play", "full_stop", "Play / pause", "Let the recording go on, or stop it here.", "Recording", "Play"),
    KeyAction("second_back", "left_square_bracket", "A second back", "Step one second back.", "Recording"),
    KeyAction("second_on", "right_square_bracket", "A second on", "Step one second on.", "Recording"),
    KeyAction("minute_back", "left_curly_bracket", "A minute back", "Step one minute back.", "Recording"),
    KeyAction("minute_on", "right_curly_bracket", "A minute on", "Step one minute on.", "Recording"),
    KeyAction("previous_mark", "comma", "Previous event", "The alarm or action before this moment.", "Recording"),
    KeyAction("next_mark", "semicolon", "Next event", "The next alarm or action.", "Recording", "Next event"),
    KeyAction("slower", "less_than_sign", "Slower", "Play at 10 or 1 times the speed.", "Recording"),
    KeyAction("faster", "greater_than_sign", "Faster", "Play at 10 or 60 times the speed.", "Recording", "Faster"),
    KeyAction("what_if", "w", "What if", "As t, which asks it here, too, like m, r and p.", "Recording", "What if"),
)  # fmt: skip
"""Of a console that is open on a recording."""


def actions(replay: bool) -> tuple[KeyAction, ...]:
    """What a console offers. In a recording nothing acts: the footer is for the keys that move in it."""
    if not replay:
        return ACTIONS
    return (*(replace(a, footer="") if a.group == "Act" else a for a in ACTIONS), *REPLAY_ACTIONS)


MOVES = "arrows or h j k l move the cursor, home and end go to the first and last GPU, a click selects"
