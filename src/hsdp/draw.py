"""Pictures of a mesh: hosts as boxes, ranks as cells coloured by shard group, in a terminal or as SVG and PNG.

    host a | replicate 0   [0]===[1] |   === gather, reduce-scatter: along a row, inside one copy
           |                :     :  |
    host b | replicate 1   [2]===[3] |    :  cross-reduce: down a column, between equal parts of all copies

Every host's box holds a line for each row that has ranks on it, and a rank stands at its column in all of them: so a
shard group is one line, a replicate group one vertical, and what crosses hosts crosses boxes. Holds numbers and text
only; rich and matplotlib are imported where they are used. Must not know: torch, process groups.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hsdp.control import format_ranks
from hsdp.placement import num_spanning

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# Okabe and Ito's colours, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/), without black.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2")
FORMATS = (".svg", ".png")


@dataclass(frozen=True)
class Line:
    """What one host has of one row.

    Attributes:
        row: the row's number, its coordinate along replicate.
        ranks: rank by column, its coordinate along shard.
    """

    row: int
    ranks: dict[int, int]


@dataclass(frozen=True)
class MeshPicture:
    """A mesh and where its ranks are, ready to be drawn.

    Attributes:
        rows: the ranks of every shard group, in mesh order.
        host_of: the host's name, by rank.
    """

    rows: tuple[tuple[int, ...], ...]
    host_of: Mapping[int, str]

    @property
    def replicate(self) -> int:
        return len(self.rows)

    @property
    def shard(self) -> int:
        return len(self.rows[0])

    def lines(self) -> dict[str, list[Line]]:
        """By host, in the order of their first ranks, the lines of its box from top to bottom."""
        boxes: dict[str, list[Line]] = {self.host_of[rank]: [] for rank in sorted(self.host_of)}
        for number, row in enumerate(self.rows):
            for host, lines in boxes.items():
                ranks = {column: rank for column, rank in enumerate(row) if self.host_of[rank] == host}
                if ranks:
                    lines.append(Line(number, ranks))
        return boxes

    def meaning(self) -> list[str]:
        """The mesh in words, a sentence each."""
        copies = "1 copy" if self.replicate == 1 else f"{self.replicate} copies"
        ranks = "1 rank" if self.shard == 1 else f"{self.shard} ranks"
        spread = "" if self.replicate == 1 else "each "
        spanning = num_spanning(self.host_of, self.rows)
        inside = "every shard group stays inside a host" if not spanning else (
            f"{spanning} of {self.replicate} shard groups span hosts: their gathers use the links between hosts"
        )  # fmt: skip
        return [
            f"replicate {self.replicate} x shard {self.shard}: {copies} of the model, {spread}spread over {ranks}",
            inside,
        ]


GATHER_TEXT = "gather and reduce-scatter, inside one copy (shard group)"
CROSS_TEXT = "cross-reduce of gradients, between equal parts of all copies (replicate group)"


def colour_of(row: int) -> str:
    return COLOURS[row % len(COLOURS)]


# ---- in a terminal ---------------------------------------------------------------------------------------------------


class _Marks(NamedTuple):
    gather: str
    cross: str


_MARKS = _Marks("\N{BOX DRAWINGS HEAVY HORIZONTAL}", "\N{BOX DRAWINGS LIGHT QUADRUPLE DASH VERTICAL}")
_ASCII_MARKS = _Marks("=", ":")


def in_terminal(picture: MeshPicture, console: Console) -> RenderableType:
    """The picture for rich. A mesh too wide for the console is told in ranks by row, without cells."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    cell = max(len(str(rank)) for rank in picture.host_of) + 2
    label = len(f"replicate {picture.replicate - 1}") + 2
    fits = label + picture.shard * (cell + 2) + 4 <= console.width
    marks = _MARKS if console.encoding.startswith("utf") else _ASCII_MARKS
    boxes: list[Any] = [Text(text) for text in picture.meaning()]
    boxes[0].stylize("bold")
    last_row = picture.replicate - 1
    for host, lines in picture.lines().items():
        body: list[Text] = []
        for line in lines:
            body.append(_cells(line, picture.shard, cell, label, marks.gather) if fits else _listed(line, label))
            if fits and line.row < last_row:
                body.append(_verticals(line, cell, label, marks.cross))
        boxes.append(Panel(Group(*body), title=host, title_align="left", expand=False))
    if picture.shard > 1:
        boxes.append(Text(f"{marks.gather} " if fits else "each line: ").append(GATHER_TEXT))
    if picture.replicate > 1:
        boxes.append(Text(f"{marks.cross} " if fits else "equal places in all rows: ").append(CROSS_TEXT))
    return Group(*boxes)


def show(picture: MeshPicture) -> None:
    """Print the picture, as wide as the terminal."""
    from rich.console import Console

    console = Console()
    console.print(in_terminal(picture, console))


def _cells(line: Line, num_columns: int, cell: int, label: int, mark: str) -> Text:
    from rich.text import Text

    text = Text(f"replicate {line.row}".ljust(label))
    first, last = min(line.ranks), max(line.ranks)
    for column in range(num_columns):
        rank = line.ranks.get(column)
        inside = first <= column < last
        if rank is None:
            text.append((mark if inside and column > first else " ") * cell, colour_of(line.row))
        else:
            text.append(str(rank).center(cell), f"bold black on {colour_of(line.row)}")
        text.append(2 * mark if inside else "  ", colour_of(line.row))
    return text


def _verticals(line: Line, cell: int, label: int, mark: str) -> Text:
    from rich.text import Text

    text = [" "] * (label + (max(line.ranks) + 1) * (cell + 2))
    for column in line.ranks:
        text[label + column * (cell + 2) + cell // 2] = mark
    return Text("".join(text).rstrip())


def _listed(line: Line, label: int) -> Text:
    from rich.text import Text

    ranks = format_ranks(list(line.ranks.values()))
    return Text(f"replicate {line.row}".ljust(label)).append(ranks, f"bold {colour_of(line.row)}")


# ---- as a file -------------------------------------------------------------------------------------------------------

_CELL = 0.62  # of the distance between two cells
_BOX: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.12", "linewidth": 1.2}


def save(picture: MeshPicture, path: str | Path) -> Path:
    """Write the picture as SVG or PNG, by the path's suffix.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r}: a picture is one of {', '.join(FORMATS)}")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    boxes, places, height = _place(picture)
    size = (max(6.5, 0.75 * picture.shard + 2.2), max(2.6, 0.62 * height + 1.6))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    _draw_hosts(axes, picture, boxes)
    _draw_links(axes, picture, places)
    _draw_ranks(axes, picture, places)
    axes.set_xlim(-2.1, max(picture.shard - 0.3, 5))
    axes.set_ylim(height - 1.1, -1.2)  # downwards, as text is read
    axes.axis("off")
    axes.set_title("\n".join(picture.meaning()), fontsize=10, loc="left")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hsdp"}):  # text stays text; the same file every time
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def _place(picture: MeshPicture) -> tuple[list[tuple[str, list[Line], float]], dict[int, tuple[float, float]], float]:
    """(every host's box with its first line's height, where each rank's cell is, the height of all)."""
    boxes: list[tuple[str, list[Line], float]] = []
    places: dict[int, tuple[float, float]] = {}
    top = 0.0
    for host, lines in picture.lines().items():
        boxes.append((host, lines, top))
        for index, line in enumerate(lines):
            for column, rank in line.ranks.items():
                places[rank] = (column, top + index)
        top += len(lines) + 0.7
    return boxes, places, top


def _draw_hosts(axes: Any, picture: MeshPicture, boxes: Sequence[tuple[str, list[Line], float]]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for column in range(picture.shard):
        axes.text(column, -0.85, f"shard {column}", ha="center", va="center", fontsize=8, color="#555555")
    for host, lines, top in boxes:
        corner, size = (-0.5, top - 0.5), (picture.shard, len(lines))
        axes.add_patch(FancyBboxPatch(corner, *size, facecolor="#F4F4F4", edgecolor="#888888", zorder=0, **_BOX))
        name = axes.text(-0.5, top - 0.56, host, fontsize=8, fontweight="bold", color="#444444", va="bottom", zorder=2)
        name.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # over the links that pass
        for index, line in enumerate(lines):
            axes.text(-0.65, top + index, f"replicate {line.row}", ha="right", va="center", fontsize=8, color="#555555")


def _draw_links(axes: Any, picture: MeshPicture, places: Mapping[int, tuple[float, float]]) -> None:
    from matplotlib.lines import Line2D

    shown: dict[str, Any] = {}
    for number, row in enumerate(picture.rows):
        # Cell after cell on one host, then on the next: as few strokes between boxes as there are borders.
        path = sorted(row, key=lambda rank: (places[rank][1], places[rank][0]))
        xs, ys = zip(*(places[rank] for rank in path), strict=True)
        if picture.shard > 1:
            axes.plot(xs, ys, color=colour_of(number), linewidth=5, zorder=2)
            shown[GATHER_TEXT] = Line2D([], [], color="#777777", linewidth=5)  # of no row in particular
    for column in zip(*picture.rows, strict=True):
        xs, ys = zip(*sorted((places[rank] for rank in column), key=operator.itemgetter(1)), strict=True)
        if picture.replicate > 1:
            shown[CROSS_TEXT] = axes.plot(xs, ys, color="#333333", linewidth=1.3, linestyle=":", zorder=1)[0]
    if shown:
        axes.legend(
            shown.values(), shown.keys(), loc="upper left", bbox_to_anchor=(0, 0), fontsize=8, frameon=False, ncols=1
        )


def _draw_ranks(axes: Any, picture: MeshPicture, places: Mapping[int, tuple[float, float]]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for number, row in enumerate(picture.rows):
        for rank in row:
            x, y = places[rank]
            corner = (x - _CELL / 2, y - _CELL / 2)
            axes.add_patch(
                FancyBboxPatch(corner, _CELL, _CELL, facecolor=colour_of(number), edgecolor="white", zorder=3, **_BOX)
            )
            axes.text(x, y, str(rank), ha="center", va="center", fontsize=10, fontweight="bold", zorder=4)
