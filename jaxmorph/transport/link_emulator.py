"""Emulates slow, narrow or cut links on every route, and the copies of delegated messages."""

import hashlib
import math
import struct
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Generic, TypeVar

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.transport.names import TAG_WORDS

Item = TypeVar("Item")

_STEP_WORD = 1
_MOST_COPIES = 256  # that an engine remembers
_STANDARD_NORMAL = NormalDist()


class Spans(Generic[Item]):
    """An index of items, each of which applies from one moment until just before another.

    Args:
        spans: Begin, end and item; None: the item has always applied, or applies forever.

    Attributes:
        bounds: The moments at which an item begins or ends, in rising order.
    """

    def __init__(self, spans: Iterable[tuple[float | None, float | None, Item]]) -> None:
        known = list(spans)
        ends = (bound for begin, end, _ in known for bound in (begin, end) if bound is not None)
        self.bounds: Sequence[float] = sorted(set(ends))
        self._stretches: list[list[Item]] = [[] for _ in range(len(self.bounds) + 1)]
        for begin, end, item in known:
            first = 0 if begin is None else bisect_right(self.bounds, begin)
            last = bisect_left(self.bounds, math.inf if end is None else end)
            for stretch in range(first, last + 1):
                self._stretches[stretch].append(item)

    def at(self, moment: float) -> Sequence[Item]:
        """The items that hold at a moment."""
        return self._stretches[bisect_right(self.bounds, moment)]


class DirectionConditions:
    """One direction's conditions: a trace has thousands, of which one or two apply at a time.

    Attributes:
        by_time: Conditions with a span of time, in seconds since the origin.
        by_step: All others, by their spans of steps.
    """

    def __init__(self, conditions: Iterable[LinkCondition]) -> None:
        timed, others = [], []
        for each in conditions:
            if each.from_s is None and each.to_s is None:
                others.append((each.from_step, each.to_step, each))
            else:
                timed.append((each.from_s, each.to_s, each))
        self.by_time: Spans[LinkCondition] = Spans(timed)
        self.by_step: Spans[LinkCondition] = Spans(others)

    def holding(self, step: int, elapsed_s: float) -> list[LinkCondition]:
        """The conditions for a step's message, `elapsed_s` after the origin."""
        near = (*self.by_step.at(step), *self.by_time.at(elapsed_s))
        return [condition for condition in near if condition.holds(step, elapsed_s)]


def by_direction(conditions: Iterable[LinkCondition]) -> dict[tuple[int, int], DirectionConditions]:
    """Conditions by the (source, destination) that they hold for."""
    found: dict[tuple[int, int], list[LinkCondition]] = {}
    for condition in conditions:
        for direction in condition.directions():
            found.setdefault(direction, []).append(condition)
    return {direction: DirectionConditions(own) for direction, own in found.items()}


class CopyEngine:
    """One direction of an accelerator's copies, one after another.

    Calls need not come in the order in which the copies are ready: each copy takes the first gap
    that it fits into.
    """

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def copied_s(self, ready_s: float, takes_s: float) -> float:
        """When a copy that could begin at `ready_s` ends."""
        begins_s = ready_s
        for busy_s, free_s in self._busy:
            if begins_s + takes_s <= busy_s:
                break
            begins_s = max(begins_s, free_s)
        insort(self._busy, (begins_s, begins_s + takes_s))
        del self._busy[:-_MOST_COPIES]
        return begins_s + takes_s


class LinkEmulator:
    """Decides when an emulated link lets messages go, and when copies of messages end.

    It has no clock and never waits. Its answers depend only on its arguments and earlier calls, so
    two emulators with the same calls give the same answers.

    Args:
        conditions: A link that none of them names lets messages go at once.
        origin_s: When the conditions' times begin, by the clock of `now_s`.
    """

    def __init__(self, conditions: Iterable[LinkCondition], origin_s: float = 0.0) -> None:
        self._origin_s = origin_s
        self._free_at_s: dict[tuple[int, int], float] = {}
        self._copies_out: defaultdict[int, CopyEngine] = defaultdict(CopyEngine)
        self._copies_in: defaultdict[int, CopyEngine] = defaultdict(CopyEngine)
        self._of_direction = by_direction(conditions)

    def concerns(self, source: int, destination: int) -> bool:
        """Whether any condition ever applies to this direction."""
        return (source, destination) in self._of_direction

    def departure_s(
        self, source: int, destination: int, tag: Sequence[int], num_bytes: int, now_s: float
    ) -> float | None:
        """When the link lets a message go, after its copy, bandwidth, latency and jitter.

        The message occupies the sender's copies to host memory, and then the bandwidth: later
        messages wait for it.

        Args:
            tag: The message's words, at most eight; missing ones count as 0.
            now_s: When the message is ready to leave.

        Returns:
            A time of the clock of `now_s`, not before it; None while the link is cut.
        """
        direction = (source, destination)
        holding = self._holding(direction, step_of(tag), now_s)
        if any(condition.cut for condition in holding):
            return None
        num_bytes = _counted(holding, num_bytes)
        copied_s = _copied_s(self._copies_out[source], holding, num_bytes, now_s)
        sent_s = self._occupy(direction, holding, num_bytes, copied_s)
        latency_ms = math.fsum(condition.latency_ms for condition in holding)
        deviation_ms = math.hypot(*(condition.jitter_ms for condition in holding))
        if deviation_ms:
            latency_ms += deviation_ms * self._draw(direction, tag)
        return sent_s + max(latency_ms, 0.0) / 1e3

    def received_s(
        self, source: int, destination: int, tag: Sequence[int], num_bytes: int, arrived_s: float
    ) -> float:
        """When a message that has arrived is in its receiver's device memory.

        It occupies the copies that all messages to this rank share.
        """
        holding = self._holding((source, destination), step_of(tag), arrived_s)
        counted = _counted(holding, num_bytes)
        return _copied_s(self._copies_in[destination], holding, counted, arrived_s)

    def is_cut(self, source: int, destination: int, step: int, now_s: float) -> bool:
        """Whether the link delivers nothing."""
        return any(item.cut for item in self._holding((source, destination), step, now_s))

    def healed_s(self, source: int, destination: int, step: int, now_s: float) -> float:
        """The first time, from `now_s` on, at which the link is not cut for a step's messages.

        Infinity if it stays cut.
        """
        while now_s < math.inf:
            holding = self._holding((source, destination), step, now_s)
            ends_s = [math.inf if cut.to_s is None else cut.to_s for cut in holding if cut.cut]
            if not ends_s:
                break
            # The sum may round to just before the end of the cut: then it takes another round.
            now_s = max(self._origin_s + max(ends_s), math.nextafter(now_s, math.inf))
        return now_s

    def _holding(self, direction: tuple[int, int], step: int, now_s: float) -> list[LinkCondition]:
        if direction not in self._of_direction:
            return []
        return self._of_direction[direction].holding(step, now_s - self._origin_s)

    def _occupy(
        self,
        direction: tuple[int, int],
        holding: Sequence[LinkCondition],
        num_bytes: int,
        now_s: float,
    ) -> float:
        """When the message's last bit has left, after all messages before it."""
        limits = [item.bandwidth_mbps for item in holding if item.bandwidth_mbps is not None]
        if not limits:
            return now_s
        begins_s = max(now_s, self._free_at_s.get(direction, now_s))
        self._free_at_s[direction] = begins_s + 8e-6 * num_bytes / min(limits)
        return self._free_at_s[direction]

    def _draw(self, direction: tuple[int, int], tag: Sequence[int]) -> float:
        """A standard normal number that depends on the message only."""
        words = (*tag, *(0,) * (TAG_WORDS - len(tag)))
        name = struct.pack(f"<{2 + TAG_WORDS}Q", *direction, *words)
        (number,) = struct.unpack("<Q", hashlib.blake2b(name, digest_size=8).digest())
        return _STANDARD_NORMAL.inv_cdf((number // 2**12 + 0.5) / 2**52)


def _counted(holding: Iterable[LinkCondition], num_bytes: int) -> int:
    sizes = [item.message_bytes for item in holding if item.message_bytes is not None]
    return max(sizes, default=num_bytes)


def _copied_s(
    engine: CopyEngine, holding: Iterable[LinkCondition], num_bytes: int, ready_s: float
) -> float:
    rates = [item.host_copy_gbps for item in holding if item.host_copy_gbps is not None]
    return engine.copied_s(ready_s, 1e-9 * num_bytes / min(rates)) if rates else ready_s


def step_of(tag: Sequence[int]) -> int:
    """The step of a message, by its tag; negative during the warm-up before training."""
    word = tag[_STEP_WORD]
    return word - 2**32 if word >= 2**31 else word
