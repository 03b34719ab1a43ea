"""Pictures of the console, as a shell asks for them: a real node behind sshd, no terminal."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.parts.sshd import free_port
from tests.parts.still import still
from tui.cli import main
from tui.screenshot import SEARCH, picture

pytestmark = pytest.mark.usefixtures("quick_retries")


def words(path: Path) -> str:
    """What a reader of the picture reads."""
    return "".join(ET.parse(path).getroot().itertext()).replace("\xa0", " ")


@pytest.mark.parametrize(
    ("screen", "says"), [("racks", "r1"), ("links", "Links"), ("plans", "Plans"), ("alarms", "Actions")]
)
def test_a_pane_becomes_a_picture(inventory: Path, tmp_path: Path, screen: str, says: str) -> None:
    out = tmp_path / "new" / "x.svg"
    command = ["screenshot", screen, "-o", str(out), "--cluster", str(inventory), "--size", "100x30"]
    assert main(command) == 0
    told = words(out)
    assert "1/1" in told, "it waited until the node was live"
    assert says in told


async def test_all_plans_for_the_job_become_one(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        (tmp_path / "x.svg").write_text(await picture(app, pilot, SEARCH))
    told = words(tmp_path / "x.svg")
    assert "Plans: " in told
    assert "tried" in told
    assert "searching" not in told


def test_without_a_job_there_is_nothing_to_search_for(
    inventory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    assert main(["screenshot", SEARCH, "-o", str(out), "--cluster", str(inventory)]) == 2
    assert "There is no job whose model could be planned for." in capsys.readouterr().err
    assert not out.exists()


def test_a_node_that_does_not_answer_is_drawn_and_named(
    inventory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = f'  - {{name: n9, type: hgx-h100, rack: r1, u: 30, ssh: "ops@127.0.0.1:{free_port()}"}}\n'
    inventory.write_text(inventory.read_text().replace("ssh: {known", dead + "ssh: {known", 1))
    out = tmp_path / "x.svg"
    assert main(["screenshot", "gpu", "-o", str(out), "--cluster", str(inventory), "--wait", "4"]) == 0
    assert "1/2" in words(out)
    assert "not live after 4 s: n9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rack", "--cluster", "lab"], "There is no screen 'rack'; there are racks, gpu, jobs, links, plans, alarms"),
        (["racks", "--cluster", "nowhere.yaml"], "nowhere.yaml"),
        (["racks", "--cluster", "h200x32"], "no address"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["screenshot", *arguments, "-o", "x.svg"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("size", ["120", "120x", "x36", "12x36", "120x4000", "ax9"])
def test_a_size_is_columns_and_rows(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["screenshot", "racks", "--cluster", "lab", "-o", "x.svg", "--size", size])
    assert left.value.code == 2
    assert "is no size; write columns and rows" in capsys.readouterr().err
