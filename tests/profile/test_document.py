"""Profiles: what is written wrong is named with file, line and key; nothing ends in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.profile import ProfileError, catalog, document, parse_address
from engine.profile.cluster import ClusterFile

SMALLEST = """\
name: lab
nodes:
  - {name: n1, type: hgx-h100, rack: r1, u: 10, ssh: "ops@10.0.0.11:22"}
  - {name: n2, type: hgx-h100, rack: r1, u: 20, ssh: "ops@10.0.0.12"}
ssh: {known_hosts: ~/.ssh/known_hosts, identity: ~/.ssh/id_ed25519, config: ~/.ssh/config}
poll_interval_s: 1
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_the_smallest_inventory_works(tmp_path: Path) -> None:
    cluster = catalog.cluster(written(tmp_path, SMALLEST))
    assert [n.name for n in cluster.nodes] == ["n1", "n2"]
    assert cluster.gpus == 16
    assert cluster.device.name == "h100-sxm-80g"
    assert cluster.node_gb_s == 8 * 400 / 8


@pytest.mark.parametrize(
    ("change", "line", "says"),
    [
        (("rack: r1, u: 10", "rack: r1, uu: 10"), 3, "nodes[0].uu: unknown key; did you mean 'u'?"),
        (("poll_interval_s: 1", "poll_intervall_s: 1"), 6, "did you mean 'poll_interval_s'?"),
        (("u: 20", "u: high"), 4, "nodes[1].u: expected a whole number, got text"),
        (("name: n2, ", ""), 4, "nodes[1]: the key 'name' is missing"),
        (("poll_interval_s: 1", "poll_interval_s: 0"), 6, "poll_interval_s: expected a number >= 0.1"),
        (("name: lab", "name: lab\nname: lab2"), 2, "the key 'name' is given twice"),
        (("u: 20,", "u: 20"), 4, "not valid YAML"),
        (("u: 20", "u: [1, 2]"), 4, "nodes[1].u: expected a whole number, got a list"),
    ],
)
def test_a_typo_is_named_with_its_line(tmp_path: Path, change: tuple[str, str], line: int, says: str) -> None:
    path = written(tmp_path, SMALLEST.replace(*change))
    with pytest.raises(ProfileError) as error:
        catalog.cluster(path)
    assert f"{path}:{line}" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("hgx-h100, rack: r1, u: 20", "hgx-h10, rack: r1, u: 20"), "Did you mean 'hgx-h100'?"),
        (("u: 20", "u: 12"), "'n2' and 'n1' both fill rack r1 unit 12"),
        (("name: n2", "name: n1"), "the name 'n1' is given to two nodes"),
        (("10.0.0.11:22", "10.0.0.11:220000"), "names port 220000; ports are 1 to 65535"),
        (("ops@10.0.0.11:22", "ops at host"), "is not an SSH address"),
        (('ssh: "ops@10.0.0.12"', 'ssh: "ops@10.0.0.12", local: true'), "both local and behind ssh"),
    ],
)
def test_what_types_cannot_say(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(ProfileError, match=r".") as error:
        catalog.cluster(written(tmp_path, SMALLEST.replace(*change)))
    assert says in str(error.value)


def test_an_empty_file_a_missing_file_and_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="the file is empty; it needs the keys name, nodes"):
        catalog.cluster(written(tmp_path, "# nothing\n"))
    with pytest.raises(ProfileError, match="There is no file"):
        catalog.cluster(str(tmp_path / "absent.yaml"))
    with pytest.raises(ProfileError, match="Did you mean 'h200x32'"):
        catalog.cluster("h200x23")
    (tmp_path / "bin.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ProfileError, match="not UTF-8"):
        catalog.cluster(str(tmp_path / "bin.yaml"))


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"name: !!python/object/apply:os.system ['touch {marker}']\nnodes: []\n"
    with pytest.raises(ProfileError, match="not valid YAML"):
        catalog.cluster(written(tmp_path, text))
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        "name: !!timestamp noon",
        "name: !!bool maybe",
        "name: !!int ''",
        "name: !!float ''",
        "name: !!binary é",
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "a: &a [*a]",
        "[" * 20_000,
        "a: *b",
        "name: \x00",
        "<<: 3",
    ],
)
def test_what_yaml_itself_stumbles_on_is_a_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(ProfileError, match=r"mine\.yaml"):
        catalog.cluster(written(tmp_path, text))


@given(st.text(max_size=200))
def test_any_text_is_a_cluster_or_a_sentence(text: str) -> None:
    try:
        document.decode(text, ClusterFile, "any.yaml")
    except ProfileError as error:
        assert str(error).startswith("any.yaml")


@given(st.text(max_size=40))
def test_any_address_is_read_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert address.host
    assert 0 < address.port < 65536


def test_addresses() -> None:
    full = parse_address("ops@[fe80::1]:2222")
    assert (full.user, full.host, full.port) == ("ops", "fe80::1", 2222)
    assert parse_address("host").port == 22
