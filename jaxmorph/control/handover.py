"""Finds inside a step, at one end of a link, that its messages have become slow.

The rule is that of `route_record`, so a healthy link is hardly ever found slow. Rank 0 then plans
while the step goes on. The rest of a direct link's messages are delegated at once
(`runtime.failover_route`): such a handover costs what delegation costs, and waits only for the two
ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxmorph.control.link_state import Direction, PathFailure, directions_of
from jaxmorph.control.measurements import LinkSample
from jaxmorph.control.route_record import SETTLED_RUN, RouteRecord, RouteState, typical_ms
from jaxmorph.records import Link

_EITHER = (-1, -1)


@dataclass(frozen=True)
class SlowLink:
    """A link has turned slow in the step that runs now.

    Attributes:
        late_ms: See `EndWatch.late_messages`.
        left: How its direct path was left; None: its messages are delegated anyway.
    """

    link: Link
    late_ms: Mapping[str, tuple[float, ...]]
    left: PathFailure | None = None


class EndWatch:
    """Judges a link's transfers on one route, one after another, by their times at one of its ends.

    Each direction has a history, and both together have another: where both are late, their
    messages are counted together.
    """

    def __init__(self, link: Link) -> None:
        every = (*directions_of(link), _EITHER)
        self._records = {each: RouteRecord(RouteState()) for each in every}
        self._in_time: set[Direction] = set()  # since a message was late
        self._is_armed, self._was_late = True, False

    def late_messages(
        self, took_ms: Mapping[Direction, float], at_ms: float
    ) -> dict[str, tuple[float, ...]]:
        """The messages that make the link slow, after this transfer; {} if it is not slow.

        They are returned once, until messages have been in time for a step. A direction without
        messages since the other turned late counts as late too: most links are slow both ways.

        Args:
            took_ms: The transfer's time, or both times of a pair, without waiting for the peer.
            at_ms: When it ended.

        Returns:
            The times of the last messages of each direction that is late, such as `1>2`.
        """
        is_late = False
        for direction, each_ms in (*took_ms.items(), (_EITHER, max(took_ms.values()))):
            is_late |= self._read(self._records[direction], each_ms, at_ms)
        late_ms = {at: tuple(record.late) for at, record in self._records.items() if at != _EITHER}
        longest_ms = max(late_ms.values(), key=len)
        if longest_ms:
            self._in_time |= {each for each in took_ms if not late_ms[each]}
        else:
            self._in_time.clear()
        self._was_late |= any(late_ms[each] for each in took_ms)
        if self._is_armed and is_late and longest_ms:  # a direction may be too new to be judged
            self._is_armed = False
            return {
                "{}>{}".format(*direction): run_ms or longest_ms
                for direction, run_ms in late_ms.items()
                if run_ms or direction not in self._in_time
            }
        return {}

    def _read(self, record: RouteRecord, took_ms: float, at_ms: float) -> bool:
        if record.usual is None:
            record.healthy.learn([took_ms])
            return False
        sample = LinkSample(0, took_ms, at_ms)
        record.read(sample, record.usual, learns=self._is_armed)
        return bool(record.late) and bool(record.late_beyond_chance())

    def end_step(self) -> None:
        """Let the usual times follow the messages of the step."""
        for record in self._records.values():
            record.settle()
        is_calm = not self._was_late and len(self._records[_EITHER].calm) >= SETTLED_RUN
        self._is_armed, self._was_late = self._is_armed or is_calm, False

    def restart(self) -> None:
        """Judge the link again only after a step in time, as it has returned to its path."""
        self._is_armed = False
        for record in self._records.values():
            record.reset()


def late_in_words(late_ms: Mapping[str, tuple[float, ...]]) -> str:
    """Why a link is handed over, such as `1>2 took 31.2 ms (28.9 to 34.0), 5 times in a row`."""
    runs = (
        f"{direction} took {typical_ms(run_ms)}, {len(run_ms)} times in a row"
        for direction, run_ms in late_ms.items()
    )
    return "; ".join(runs)
