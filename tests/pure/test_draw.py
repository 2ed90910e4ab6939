"""Pictures of meshes: what stands where, in a terminal and in files, and the command that draws without a run."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hsdp.commands import app
from hsdp.draw import CROSS_TEXT, GATHER_TEXT, Line, MeshPicture, in_terminal, save
from hsdp.placement import arrange, plan_world


def picture_of(counts: list[int], replicate: int, shard: int, order: str = "block") -> MeshPicture:
    world = plan_world(counts, order)
    return MeshPicture(tuple(map(tuple, arrange(world.hosts, replicate, shard))), dict(enumerate(world.names)))


def printed(picture: MeshPicture, width: int = 100, encoding: str = "utf-8") -> list[str]:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding)
    console = Console(file=file, width=width, color_system=None)
    console.print(in_terminal(picture, console))
    file.flush()
    return [line.rstrip() for line in written.getvalue().decode(encoding).splitlines()]


def test_every_rank_stands_once_at_its_coordinates() -> None:
    picture = picture_of([4, 2, 6], 3, 4)
    boxes = picture.lines()
    assert boxes == {
        "host 0": [Line(0, {0: 0, 1: 1, 2: 2, 3: 3})],
        "host 1": [Line(1, {0: 4, 1: 5})],
        "host 2": [Line(1, {2: 6, 3: 7}), Line(2, {0: 8, 1: 9, 2: 10, 3: 11})],
    }
    assert picture.meaning() == [
        "replicate 3 x shard 4: 3 copies of the model, each spread over 4 ranks",
        "1 of 3 shard groups span hosts: their gathers use the links between hosts",
    ]


def test_the_terminal_shows_hosts_rows_and_columns() -> None:
    assert printed(picture_of([4, 4], 4, 2, "round-robin")) == [
        "replicate 4 x shard 2: 4 copies of the model, each spread over 2 ranks",
        "every shard group stays inside a host",
        "╭─ host 0 ────────────────╮",
        "│ replicate 0   0 ━━ 2    │",
        "│               ┊    ┊    │",
        "│ replicate 2   4 ━━ 6    │",
        "│               ┊    ┊    │",
        "╰─────────────────────────╯",
        "╭─ host 1 ────────────────╮",
        "│ replicate 1   1 ━━ 3    │",
        "│               ┊    ┊    │",
        "│ replicate 3   5 ━━ 7    │",
        "╰─────────────────────────╯",
        f"━ {GATHER_TEXT}",
        f"┊ {CROSS_TEXT}",
    ]


def test_a_terminal_without_unicode() -> None:
    lines = printed(picture_of([2, 2], 2, 2), encoding="ascii")
    assert "| replicate 0   0 == 1    |" in lines
    assert "|               :    :    |" in lines


@pytest.mark.parametrize(("replicate", "shard", "told"), [(4, 1, CROSS_TEXT), (1, 4, GATHER_TEXT), (1, 1, None)])
def test_only_links_that_are_there_are_explained(replicate: int, shard: int, told: str | None) -> None:
    text = "\n".join(printed(picture_of([replicate * shard], replicate, shard)))
    assert [each for each in (GATHER_TEXT, CROSS_TEXT) if each in text] == ([told] if told else [])
    assert ("━━" in text, "┊" in text) == (shard > 1, replicate > 1)


def test_a_mesh_wider_than_the_terminal_is_told_by_rows() -> None:
    lines = printed(picture_of([32, 32], 2, 32), width=80)
    assert "│ replicate 0  ranks 0-31 │" in lines
    assert "│ replicate 1  ranks 32-63 │" in lines
    assert max(map(len, lines)) <= 80
    assert sum(" 31 " in line for line in printed(picture_of([32, 32], 2, 32), width=300)) == 1


def test_the_svg_has_every_rank_host_and_word(tmp_path: Path) -> None:
    picture = picture_of([3, 3], 3, 2)
    path = save(picture, tmp_path / "mesh.svg")
    texts = ["".join(each.itertext()).strip() for each in ElementTree.parse(path).iter() if each.tag.endswith("}text")]
    for rank in range(6):
        assert texts.count(str(rank)) == 1
    for text in ("host 0", "host 1", "shard 0", "shard 1", "replicate 0", "replicate 2", GATHER_TEXT, CROSS_TEXT):
        assert texts.count(text) == 1
    assert texts.count("replicate 1") == 2  # a line in each host
    assert path.read_bytes() == save(picture, tmp_path / "again.svg").read_bytes()


def test_the_png_is_one(tmp_path: Path) -> None:
    assert save(picture_of([2], 1, 2), tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"mesh\.jpg.*\.svg, \.png"):
        save(picture_of([2], 1, 2), tmp_path / "mesh.jpg")


def test_planned_worlds_are_numbered_as_a_launcher_would() -> None:
    assert plan_world([2, 3]).names == ("host 0", "host 0", "host 1", "host 1", "host 1")
    dealt = plan_world([1, 3], "round-robin")
    assert dealt.names == ("host 0", "host 1", "host 1", "host 1")
    assert plan_world([2, 3], "round-robin").local_ranks == (0, 0, 1, 1, 2)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["mesh", *arguments], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def test_the_command(tmp_path: Path) -> None:
    status, out, error = run("--hosts", "2", "--per-host", "8", "--shard", "4")
    assert (status, error) == (0, "")
    assert out.startswith("replicate 4 x shard 4: 4 copies of the model, each spread over 4 ranks\n")
    assert "replicate 3   12 ━━ 13 ━━ 14 ━━ 15" in out
    assert run("--per-host", "4", "--shard", "node")[1].startswith("replicate 2 x shard 4: ")
    assert run("--per-host", "4", "--shard", "-1", "--replicate", "8")[1].startswith("replicate 8 x shard 1: ")
    svg, png = str(tmp_path / "a.svg"), str(tmp_path / "a.png")
    assert run("--per-host", "4,2", "--svg", svg, "--png", png) == (0, f"{svg}\n{png}\n", "")
    assert Path(svg).stat().st_size
    assert Path(png).stat().st_size


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--shard", "3"], ["shard=3 does not divide the world of 16 ranks"]),
        (["--shard", "rack"], ["shard='rack' is not a mesh size", '"node"']),
        (["--per-host", "8,4", "--shard", "node"], ['shard="node" needs equally many ranks on every host']),
        (["--replicate", "3", "--shard", "4"], ["replicate=3 x shard=4 needs 12 ranks, the world has 16"]),
        (["--per-host", "8,8,8"], ["--per-host 8,8,8", "2 hosts"]),
        (["--per-host", "many"], ["--per-host many"]),
        (["--per-host", "0"], ["[0, 0]"]),
        (["--hosts", "0"], ["at least one host"]),
        (["--order", "random"], ["order='random'", "block, round-robin"]),
        (["--svg", "mesh.png"], ["--svg mesh.png", "end with .svg"]),
        (["--png", "no/such/folder/mesh.png"], ["no/such/folder/mesh.png"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], wanted: list[str]) -> None:
    status, out, error = run(*arguments)
    assert (status, out, error.count("\n")) == (2, "", 1)
    for text in wanted:
        assert text in error
