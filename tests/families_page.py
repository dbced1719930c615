"""What docs/families.md says of each family, for the laws that hold it against what they find."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "families.md"


def table(head: str) -> dict[str, tuple[str, ...]]:
    """A table of the page by its first column; `head` is that column's."""
    lines = iter(PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {head} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip(" `") for cell in line.strip("|").split("|")))
    return {row[0]: row[1:] for row in rows}


RUN, REFUSED = table("runs"), table("refused")
FEW_BITS = [family for family, cells in RUN.items() if cells[-1] == "yes"]
"""Families whose keys and values may be held in few bits."""
