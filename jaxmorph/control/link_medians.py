"""What each direction of each link took in one step: the medians that a run records."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from jaxmorph.control.link_samples import LinkSample

_DIGITS = 3


def link_medians_ms(samples: Iterable[LinkSample]) -> dict[str, float]:
    """The median time of a step's activations and gradients on their way, for each direction.

    Args:
        samples: What each message took: see `link_samples`.

    Returns:
        Milliseconds to a microsecond, by directions such as ``2>3``, in rising order.
    """
    of_direction: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        of_direction[sample.source, sample.destination].append(sample.duration_ms)
    return {
        f"{source}>{destination}": round(median(values), _DIGITS)
        for (source, destination), values in sorted(of_direction.items())
    }
