"""docs/launch.md quotes only commands that are in the examples, which the other tests here run."""

from __future__ import annotations

import re

from launched import EXAMPLES, ROOT

DOC = ROOT / "docs" / "launch.md"
SOURCES = [EXAMPLES / "train.py", *sorted((EXAMPLES / "launch").iterdir()), ROOT / "docs" / "mesh.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)


def test_commands_are_those_of_the_examples() -> None:
    known = {
        line.removeprefix("#").strip() for path in SOURCES if path.is_file() for line in path.read_text().splitlines()
    }
    quoted = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(quoted) >= 8
    assert not [line for line in quoted if line not in known]


def test_the_table_starts_what_is_there() -> None:
    commands = re.findall(r"^\| .* \| (?:on each: )?`(.*)` \|$", DOC.read_text().partition("\n## ")[0], re.MULTILINE)
    assert len(commands) == 5
    text = "".join(path.read_text() for path in SOURCES if path.is_file())
    assert not [command for command in commands if command not in text]


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", DOC.read_text())
    assert len(links) == 5
    assert not [link for link in links if not (DOC.parent / link).is_file()]
