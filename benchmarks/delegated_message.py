"""What a delegated message costs, and where: `python -m benchmarks.delegated_message [--out FILE]`.

Two ranks, each with its sidecar, send lone messages of several sizes as a run does: a copy into a
slot (on CPUs at once, else by a program), the two sidecars, and a copy out at the receiver. The
direct route moves the same payloads in the same rounds. docs/explanation/measurements.md explains
the columns.

Each rank is a process of its own, as in a run: in one process the receiver's waiting thread and the
sender's callback would take the interpreter from one another. They share a clock all the same, for
they share a machine; the sidecars' estimate of its offset is not used.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.host_memory import ImmediateSend, host_callback_backends
from jaxmorph.program.instructions import Channel, Payload, Transfer
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct import DirectRoute, LinkCommunicators
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.launcher import run_ranks
from jaxmorph.runtime.link_connections import open_data_plane
from jaxmorph.runtime.payloads import channel_name
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.routes import Route, TransferIdentity
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, IncomingSlot, OutgoingSlot

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 64 * KB, MB, 4 * MB, 16 * MB)
ROUNDS, BURST = 15, 10  # the first round, and the first message of each burst, only warm up
QUIET_S = 2e-3  # by then the receiver waits, and everything else of the message before is over
PATIENCE_S = 60.0
PARTS = ("copy in", "socket and land", "signal", "copy out", "whole")
COLUMNS = ("dispatch", *PARTS, "direct dispatch", "direct whole", "memcpy")

Stamps = dict[str, float]


class StampedSlot:
    """A reserved slot that notes when its payload is there: it is posted right after that."""

    def __init__(self, slot: OutgoingSlot, stamps: Stamps) -> None:
        self._slot, self._stamps = slot, stamps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)

    def post(self, num_bytes: int, tag: tuple[int, ...]) -> None:
        """Note the time, and post it."""
        self._stamps["posted"] = time.monotonic()
        self._slot.post(num_bytes, tag)


class StampedPlane(SidecarPlane):
    """A data plane that notes when its last message was posted, had landed, and was taken."""

    def __init__(self, *arguments: Any) -> None:
        self.stamps: Stamps = {}
        super().__init__(*arguments)

    def reserve(self, channel: ChannelName, deadline_s: float) -> Any:
        """A slot that notes when it is posted."""
        return StampedSlot(super().reserve(channel, deadline_s), self.stamps)

    def take(self, channel: ChannelName, deadline_s: float) -> IncomingSlot:
        """The next message, whose times are noted."""
        slot = super().take(channel, deadline_s)
        self.stamps.update(landed=slot.received_s, taken=time.monotonic())
        return slot


class End(NamedTuple):
    """One rank's end of both routes."""

    rendezvous: Rendezvous
    plane: StampedPlane
    routes: Mapping[str, Route]
    values: Mapping[Channel, jax.Array]

    def move(self, name: str, channel: Channel, number: int) -> Stamps:
        """Move one message and return the stamps of both ends, in seconds of their clock."""
        route = self.routes[name]
        identity = TransferIdentity(0, number, Transfer(*channel[:3], channel.tied_index, 0))
        self.plane.stamps.clear()
        if self.rendezvous.rank == 0:
            mine = self._post(route, identity, self.values[channel])
        else:
            mine = {"came": time.monotonic()}
            jax.block_until_ready(route.take(identity, 0.0, time.monotonic() + PATIENCE_S).value)
            mine["ready"] = time.monotonic()
        sent, received = self.rendezvous.exchange(mine | self.plane.stamps)
        return {**sent, **received}

    def _post(self, route: Route, identity: TransferIdentity, value: jax.Array) -> Stamps:
        time.sleep(QUIET_S)
        began_s = time.monotonic()
        moved = route.post(identity, value, 0.0)
        returned_s = time.monotonic()
        jax.block_until_ready(moved.value)
        route.settle()
        return {"began": began_s, "returned": returned_s}


def parts_of(name: str, at: Stamps) -> dict[str, float]:
    """The parts of one message's time, in microseconds, by column."""
    dispatch, whole = at["returned"] - at["began"], at["ready"] - at["began"]
    if name == "direct":
        return {"direct dispatch": 1e6 * dispatch, "direct whole": 1e6 * whole}
    moments = [at[key] for key in ("began", "posted", "landed", "taken", "ready")]
    spans = [later - sooner for sooner, later in pairwise(moments)]
    found = dict(zip(PARTS, (*spans, whole), strict=True))
    return {"dispatch": 1e6 * dispatch, **{part: 1e6 * span for part, span in found.items()}}


def memcpy_us(num_bytes: int) -> float:
    """One copy of a message, from memory to memory that has been used before."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    began_s = time.monotonic()
    target[:] = source
    return 1e6 * (time.monotonic() - began_s)


def measure(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """One of the two ranks; both move the same messages, and rank 0 reports their times."""
    del rest
    rendezvous = join_run(arguments, start_timeout_s=60, step_timeout_s=60)
    mesh, rank = make_mesh(2), arguments.rank
    placement = NamedSharding(stage_submesh(mesh, rank), PartitionSpec())
    payloads = {
        Channel(Payload.TIED, 0, 1, index): PayloadShape((size // 4,), jnp.dtype(jnp.float32))
        for index, size in enumerate(SIZES)
    }
    # Each payload is whole in its slot, as activations and gradients are.
    uses = {channel: SlotUse(each, each.shape[0]) for channel, each in payloads.items()}
    specs = [ChannelSpec(channel_name(channel), uses[channel].slot_bytes, 2) for channel in uses]
    programs = LinkCommunicators(mesh, payloads, answered=False).first_programs()
    backend = ImmediateSend(host_callback_backends()[0])
    outgoing, incoming = (specs, []) if rank == 0 else ([], specs)
    with open_data_plane(rendezvous, outgoing, incoming, start=StampedPlane.start) as plane:
        assert isinstance(plane, StampedPlane)
        delegated = DelegatedRoute(plane, uses, rank, placement, backend)
        values = {
            channel: jax.device_put(np.ones(payload.shape, payload.dtype), placement)
            for channel, payload in payloads.items()
        }
        routes = {"delegated": delegated, "direct": DirectRoute(programs, answered=False)}
        found, late = in_rounds(End(rendezvous, plane, routes, values))
        if rank == 0:
            link.send({"kind": "figures", "tier": backend.name, "late": late, "us": found})
        rendezvous.exchange({})


def in_rounds(end: End) -> tuple[dict[int, dict[str, list[float]]], int]:
    """All sizes on both routes, again and again; and how many messages found no receiver waiting.

    Those are left out: their times would be the receiver's delay.
    """
    found: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in SIZES}
    number = late = 0
    for round_ in range(ROUNDS + 1):
        for size, channel in zip(SIZES, end.values, strict=True):
            for name in end.routes:
                for at in range(BURST + 1):
                    stamps, number = end.move(name, channel, number), number + 1
                    if not (round_ and at):
                        continue
                    if stamps["came"] > stamps["began"]:
                        late += 1
                        continue
                    for column, value_us in parts_of(name, stamps).items():
                        found[size][column].append(value_us)
            if end.rendezvous.rank == 0:
                found[size]["memcpy"].append(memcpy_us(size))
    return found, late


def split(medians_us: Mapping[int, float]) -> dict[str, float]:
    """A column's cost per message and per MB.

    A line through the medians, by least squares of the relative errors: 4 KB counts as 16 MB does.
    """
    megabytes, costs = np.array([*medians_us]) / MB, np.array([*medians_us.values()])
    design = np.stack([np.ones_like(costs), megabytes], axis=1) / costs[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(design, np.ones_like(costs), rcond=None)
    off = np.abs((fixed + slope * megabytes) / costs - 1).max()
    return {
        "us_per_message": round(float(fixed), 1),
        "us_per_mb": round(float(slope), 1),
        "off_by_at_most": round(float(off), 3),
    }


def summary(figures: Mapping[str, Any], load_before: tuple[float, ...]) -> dict[str, Any]:
    """Quartiles, the medians' split, and where they were measured."""
    quartiles_us = {
        int(size): {column: [round(q, 1) for q in quantiles(row[column])] for column in COLUMNS}
        for size, row in figures["us"].items()
    }
    packages = ("jax", "jaxlib", "numpy", "crc32c", "jaxmorph")
    return {
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "tier": figures["tier"],
        "messages_of_a_size": ROUNDS * BURST,
        "left_out_as_late": figures["late"],
        "quartiles_us": quartiles_us,
        "split": {c: split({n: row[c][1] for n, row in quartiles_us.items()}) for c in COLUMNS},
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the tables."""
    before, after = result["load_before"][0], result["load_after"][0]
    print(f"load {before:.1f} before, {after:.1f} after; {result['cores']} cores; {result['tier']}")
    print(f"{result['messages_of_a_size']} messages of a size, {result['left_out_as_late']} late")
    print("\nmedian microseconds\n" + f"{'KB':>15}" + "".join(f"{c:>16}" for c in COLUMNS))
    for size, row in result["quartiles_us"].items():
        print(f"{size // KB:>15}" + "".join(f"{row[column][1]:>16.0f}" for column in COLUMNS))
    titles = {"us_per_message": "us a message", "us_per_mb": "and a MB", "off_by_at_most": "off by"}
    for key, title in titles.items():
        kind = ".0%" if key == "off_by_at_most" else ".0f"
        cells = (f"{result['split'][column][key]:>16{kind}}" for column in COLUMNS)
        print(f"{title:>15}" + "".join(cells))


def main() -> int:
    """Launch the ranks, and print the tables of rank 0's figures."""
    parser = argparse.ArgumentParser(description="What a delegated message costs, and where.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    messages: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run_ranks("benchmarks.delegated_message", [], 2, Path(folder), messages.append)
    (figures,) = (message for message in messages if message["kind"] == "figures")
    result = summary(figures, load_before)
    show(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if any(word.startswith("--rank=") for word in sys.argv):
        run_rank(measure)
    else:
        sys.exit(main())
