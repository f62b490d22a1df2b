"""Op orders as a grid that can be read in a terminal: a row per stage, a column per position."""

from collections.abc import Mapping, Sequence

from jaxmorph.schedule.ops import Op


def format_grid(orders: Sequence[Sequence[Op]], marked: Mapping[int, int] | None = None) -> str:
    """Lays out each stage's ops in a row, optionally with one op per stage marked as ``>F3<``.

    Args:
        orders: Each stage's ops, in execution order.
        marked: The position to mark in each stage's row; one past the end marks what is missing.

    Returns:
        One line per stage, columns aligned.
    """
    marked = marked or {}
    rows = [_row(order, marked.get(stage)) for stage, order in enumerate(orders)]
    width = max((len(cell) for row in rows for cell in row), default=0)
    digits = len(str(len(rows) - 1))
    return "\n".join(
        f"stage {stage:>{digits}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for stage, row in enumerate(rows)
    )


def _row(order: Sequence[Op], marked: int | None) -> list[str]:
    cells = [str(op) for op in order]
    if marked is not None and marked < len(cells):
        cells[marked] = f">{cells[marked]}<"
    elif marked is not None:
        cells.append("><")
    return cells
