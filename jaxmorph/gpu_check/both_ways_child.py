"""The process that has messages go both ways: `python -m jaxmorph.gpu_check.both_ways_child`.

`both_ways` starts it. Ways of copying are chosen as when a rank starts. It tells one JSON object,
and ends when its stdin does.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict

from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.copies.stage_copies import open_copies
from jaxmorph.gpu_check.child_process import end_in_time, tell
from jaxmorph.gpu_check.device import find_device
from jaxmorph.gpu_check.disturbance import measure_disturbance
from jaxmorph.gpu_check.lone_end import Site
from jaxmorph.gpu_check.settings import settings_for
from jaxmorph.gpu_check.tier_check import IncomingTier, OutgoingTier
from jaxmorph.gpu_check.traffic import BothTraffic, Traffic


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what computation loses beside messages in both directions, and tell it.

    Args:
        arguments: Words after the command's name; those of this process when None.
    """
    parser = argparse.ArgumentParser(prog="python -m jaxmorph.gpu_check.both_ways_child")
    parser.add_argument("--allow-cpu", action="store_true", help="copy as on a CPU")
    parser.add_argument("--limit-s", type=float, required=True, help="when this process ends")
    chosen = parser.parse_args(arguments)
    end_in_time(chosen.limit_s)
    device = find_device(allow_cpu=chosen.allow_cpu)
    settings, placement = settings_for(device).copies, SingleDeviceSharding(device)
    with closing(open_copies(placement, lambda keeper: None)) as copies:
        site = Site(placement, copies.ways.memory, settings.patience_s)
        into, out_of = OutgoingTier(copies.outgoing, site), IncomingTier(copies.incoming, site)

        @contextmanager
        def traffic(payload: PayloadShape) -> Iterator[Traffic]:
            with into.traffic(payload) as leaving, out_of.traffic(payload) as arriving:
                yield BothTraffic(leaving, arriving)

        found = measure_disturbance(traffic, placement, settings.matmuls)
        names = {"outgoing": copies.outgoing.name, "incoming": copies.incoming.name}
        tell(**names, disturbance=asdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
