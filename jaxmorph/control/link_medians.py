"""What each direction of each link took in one step: the medians that a run records."""

from collections import defaultdict
from functools import lru_cache
from statistics import median

from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.schedule.timeline import Timeline

_DIGITS = 3


def link_medians_ms(timeline: Timeline) -> dict[str, float]:
    """The median time of a step's activations and gradients on their way, for each direction.

    A direct transfer's time is the smaller of its ends': the one that came later waited for nobody.
    A delegated one's is its receiver's, from when it was sent until it landed. Tied gradients are
    left out, being of another length.

    Args:
        timeline: A measured step.

    Returns:
        Milliseconds to a microsecond, by directions such as ``2>3``, in rising order.
    """
    ends_ms: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for span in timeline.transfers:
        ends_ms[span.label, span.holds_queue].append(span.end_ms - span.start_ms)
    of_direction: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (label, is_held), seen in ends_ms.items():
        transfer = _parse(label)
        if transfer.payload is not Payload.TIED and len(seen) == (2 if is_held else 1):
            of_direction[transfer.source, transfer.destination].append(min(seen))
    return {
        f"{source}>{destination}": round(median(values), _DIGITS)
        for (source, destination), values in sorted(of_direction.items())
    }


_parse = lru_cache(maxsize=1 << 14)(Transfer.parse)  # the same labels come step by step
