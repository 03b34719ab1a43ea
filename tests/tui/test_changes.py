"""What goes to the terminal again when a line changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

from tui.widgets.changes import changed

STYLES = st.sampled_from([Style.null(), Style(bold=True), Style(color="red")])
SEGMENTS = st.tuples(st.text(alphabet="ab é漢█", min_size=1, max_size=4), STYLES).map(lambda s: Segment(*s))
LINES = st.lists(SEGMENTS, max_size=6)
WIDTH = 60


def cells(line: list[Segment]) -> list[tuple[str, Style | None]]:
    """What each column shows; the second column of a wide character is empty."""
    found: list[tuple[str, Style | None]] = []
    for segment in Strip(line).extend_cell_length(WIDTH):
        for character in segment.text:
            found += [(character, segment.style or Style.null())]
            found += [("", segment.style)] * (Segment(character).cell_length - 1)
    return found


@given(LINES, LINES)
def test_a_line_with_the_changed_piece_put_in_is_the_new_line(before: list[Segment], after: list[Segment]) -> None:
    shown, wanted = cells(before), cells(after)
    region = changed(3, before, after, WIDTH)
    if region is not None:
        assert (region.y, region.height) == (3, 1)
        shown[region.x : region.right] = wanted[region.x : region.right]
    assert shown == wanted
    assert (region is not None) == (before != after)


@given(LINES, st.data())
def test_a_segment_that_changes_is_all_that_goes_again(line: list[Segment], data: st.DataObject) -> None:
    if line:
        at = data.draw(st.integers(0, len(line) - 1))
        after = list(line)
        after[at] = Segment(line[at].text, Style(underline=True))
        begin = sum(s.cell_length for s in line[:at])
        assert changed(0, line, after, WIDTH) == Region(begin, 0, line[at].cell_length, 1)
