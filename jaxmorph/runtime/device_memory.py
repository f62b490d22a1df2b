"""What a device tells of its memory; a CPU tells nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

_PEAK = "peak_device_bytes"


def free_bytes(device: Any) -> int | None:
    """What is free of the memory that JAX may take on a device, or None where it doesn't tell."""
    statistics = device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def told_peak(device: Any) -> dict[str, int]:
    """What a rank tells of the most that has been in use on its device since it started.

    Returns:
        A part of its report of a step; nothing where the device doesn't tell.
    """
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {} if peak is None else {_PEAK: peak}


def peaks_of(reports: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """The most that has been in use on every rank's device, or None where one doesn't tell.

    Args:
        reports: All ranks' reports of a step, in rank order.
    """
    peaks = [report.get(_PEAK) for report in reports]
    return tuple(peak for peak in peaks if peak is not None) if None not in peaks else None
