"""Numbers of bytes in words."""


def in_bytes(count: float) -> str:
    """A number of bytes with a unit that suits it, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
