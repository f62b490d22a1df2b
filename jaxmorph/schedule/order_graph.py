"""The longest paths through a schedule, updated as ops move within their stages."""

from collections.abc import Sequence
from itertools import chain

from jaxmorph.schedule.list_schedule import Workload, held_changes

_NONE = -1


class OrderGraph:
    """A schedule as a graph: an op follows the previous op on its stage, and the maker of its data.

    Ops are numbers (see ``list_schedule.to_schedule``). Only F and B need data of another stage;
    the row's order keeps all dependencies within a stage. Lists are indexed by op.

    Attributes:
        head: When the op starts: the longest path to it.
        tail: The longest path from the op's end to the end of the step.
        rows: Each stage's ops in order.
        position: The op's index in its row.
        before: The previous op on its stage, or -1.
        after: The next op on its stage, or -1.
        held: What the stage holds after the op.
        visits: How many ops have been visited so far: the measure of effort.

    Args:
        workload: Not mirrored.
        numbers: The ops, each after its dependencies.
    """

    def __init__(self, workload: Workload, numbers: Sequence[int]) -> None:
        durations = (workload.forward, workload.backward_input, workload.backward_weight)
        count = workload.num_microbatches
        self._per_stage = 3 * count
        self.duration = _each_op(count, *durations)
        self.change = _each_op(count, *held_changes(workload))
        # For each op: the op of another stage whose data it needs, and the op that needs its data.
        self._source, self._source_lag = _sources(workload)
        self._user, self._user_lag = _users(self._source, self._source_lag)
        total = len(numbers)
        self.head, self.tail, self.held = [0] * total, [0] * total, [0] * total
        self.position, self.before, self.after = [0] * total, [_NONE] * total, [_NONE] * total
        self.rows: list[list[int]] = [[] for _ in range(total // self._per_stage)]
        for number in numbers:
            self.rows[number // self._per_stage].append(number)
        for row in self.rows:
            self._relink(row, 0, len(row))
        self._order = list(numbers)
        self._place = [0] * total
        self._renumber(0, total)
        self.visits = 3 * total  # the cost of this set-up
        self._update(0, total)

    @property
    def numbers(self) -> list[int]:
        """The ops, each after its dependencies."""
        return list(self._order)

    def last_op(self) -> int:
        """An op that ends the step."""
        head, duration = self.head, self.duration
        return max((row[-1] for row in self.rows), key=lambda op: head[op] + duration[op])

    def end(self, op: int) -> int:
        """When an op ends."""
        return self.head[op] + self.duration[op]

    def row_of(self, op: int) -> list[int]:
        """The row of the op's stage."""
        return self.rows[op // self._per_stage]

    def critical_blocks(self) -> list[list[int]]:
        """A longest path of the whole step, cut where it crosses from stage to stage."""
        head, duration, before = self.head, self.duration, self.before
        op = self.last_op()
        block, blocks = [op], []
        while True:
            previous, source = before[op], self._source[op]
            if previous >= 0 and head[previous] + duration[previous] == head[op]:
                op = previous
                block.append(op)
            elif source >= 0 and self.end(source) + self._source_lag[op] == head[op]:
                blocks.append(block[::-1])
                op = source
                block = [op]
            else:
                blocks.append(block[::-1])
                return blocks[::-1]

    def longest_through(self, sequence: Sequence[int], previous: int, following: int) -> int:
        """The longest path through ``sequence`` if it ran between two ops of its stage (or -1).

        It uses the current times of other stages, so it is an estimate if one of the ops depends
        on another one through other stages.
        """
        head, tail, duration = self.head, self.tail, self.duration
        source, source_lag, user, user_lag = (
            self._source,
            self._source_lag,
            self._user,
            self._user_lag,
        )
        self.visits += 2 * len(sequence)
        clock = head[previous] + duration[previous] if previous >= 0 else 0
        starts = []
        for op in sequence:
            needed = source[op]
            if needed >= 0:
                ready = head[needed] + duration[needed] + source_lag[op]
                if ready > clock:
                    clock = ready
            starts.append(clock)
            clock += duration[op]
        rest = tail[following] + duration[following] if following >= 0 else 0
        longest = 0
        for start, op in zip(reversed(starts), reversed(sequence), strict=True):
            needing = user[op]
            if needing >= 0:
                path = tail[needing] + duration[needing] + user_lag[op]
                if path > rest:
                    rest = path
            rest += duration[op]
            if start + rest > longest:
                longest = start + rest
        return longest

    def move_behind(self, op: int, other: int) -> bool:
        """Moves an op right behind a later one of its stage.

        Returns False and changes nothing if the later op depends on it through other stages.
        """
        first, last = self.position[op], self.position[other]
        return self._reorder(op, other, first, last, self._after_both(op, other))

    def move_ahead(self, op: int, other: int) -> bool:
        """Moves an op right ahead of an earlier one of its stage; False as in ``move_behind``."""
        first, last = self.position[other], self.position[op]
        return self._reorder(op, other, first, last, self._before_both(op, other))

    def _reorder(
        self, op: int, other: int, first: int, last: int, sorted_part: list[int] | None
    ) -> bool:
        if sorted_part is None:
            return False
        row = self.row_of(op)
        part = row[first : last + 1]
        row[first : last + 1] = [*part[1:], op] if part[0] == op else [op, *part[:-1]]
        self._relink(row, first, last + 1)
        begin, end = sorted((self._place[op], self._place[other]))
        self._order[begin : end + 1] = sorted_part
        self._renumber(begin, end + 1)
        self._update(begin, end + 1)
        return True

    def _after_both(self, op: int, other: int) -> list[int] | None:
        """The part of the order from `op` to `other`, with `op` and its dependents last."""
        part = self._order[self._place[op] : self._place[other] + 1]
        self.visits += len(part)
        source, before = self._source, self.before
        moved, kept, later = {op}, [], [op]
        for each in part[1:]:
            # The next op on `op`'s stage will no longer follow it.
            previous = before[each]
            if source[each] in moved or (previous in moved and previous != op):
                if each == other:
                    return None
                moved.add(each)
                later.append(each)
            else:
                kept.append(each)
        return kept + later

    def _before_both(self, op: int, other: int) -> list[int] | None:
        """The part of the order from `other` to `op`, with `op` and its dependencies first."""
        part = self._order[self._place[other] : self._place[op] + 1]
        self.visits += len(part)
        user, after = self._user, self.after
        moved, kept, sooner = {op}, [], [op]
        for each in reversed(part[:-1]):
            following = after[each]
            if user[each] in moved or (following in moved and following != op):
                if each == other:
                    return None
                moved.add(each)
                sooner.append(each)
            else:
                kept.append(each)
        return sooner[::-1] + kept[::-1]

    def _relink(self, row: list[int], begin: int, end: int) -> None:
        """Updates neighbours, positions and memory of a part of a row."""
        position, before, after, held = self.position, self.before, self.after, self.held
        previous = row[begin - 1] if begin else _NONE
        holds = held[previous] if begin else 0
        for place in range(begin, end):
            op = row[place]
            position[op], before[op] = place, previous
            if previous >= 0:
                after[previous] = op
            holds += self.change[op]
            held[op] = holds
            previous = op
        following = row[end] if end < len(row) else _NONE
        after[previous] = following
        if following >= 0:
            before[following] = previous

    def _renumber(self, begin: int, end: int) -> None:
        order, place = self._order, self._place
        for index in range(begin, end):
            place[order[index]] = index

    def _update(self, begin: int, end: int) -> None:
        """Updates heads from `begin` of the order on, and tails from `end` back."""
        self.visits += 2 * len(self._order)
        self._update_heads(begin)
        self._update_tails(end)

    def _update_heads(self, begin: int) -> None:
        head, duration, before = self.head, self.duration, self.before
        source, lag = self._source, self._source_lag
        for op in self._order[begin:]:
            previous, needed = before[op], source[op]
            start = head[previous] + duration[previous] if previous >= 0 else 0
            if needed >= 0:
                ready = head[needed] + duration[needed] + lag[op]
                if ready > start:
                    start = ready
            head[op] = start

    def _update_tails(self, end: int) -> None:
        tail, duration, after = self.tail, self.duration, self.after
        user, lag = self._user, self._user_lag
        for op in reversed(self._order[:end]):
            following, needing = after[op], user[op]
            rest = tail[following] + duration[following] if following >= 0 else 0
            if needing >= 0:
                path = tail[needing] + duration[needing] + lag[op]
                if path > rest:
                    rest = path
            tail[op] = rest


def _each_op(
    count: int, forward: Sequence[int], backward: Sequence[int], weight: Sequence[int]
) -> list[int]:
    of_kinds = chain.from_iterable(zip(forward, backward, weight, strict=True))
    return [*chain.from_iterable([kind] * count for kind in of_kinds)]


def _sources(workload: Workload) -> tuple[list[int], list[int]]:
    """F needs the previous stage, B the next one."""
    count, last = workload.num_microbatches, workload.num_stages - 1
    source: list[int] = []
    lag: list[int] = []
    for stage in range(workload.num_stages):
        forwards = range(3 * count * stage, 3 * count * stage + count)
        above = [op - 3 * count for op in forwards] if stage else [_NONE] * count
        below = [op + 4 * count for op in forwards] if stage < last else [_NONE] * count
        source += [*above, *below, *[_NONE] * count]
        above_lag = workload.forward_latency[stage - 1] if stage else 0
        below_lag = workload.backward_latency[stage + 1] if stage < last else 0
        lag += [above_lag] * count + [below_lag] * count + [0] * count
    return source, lag


def _users(source: Sequence[int], source_lag: Sequence[int]) -> tuple[list[int], list[int]]:
    user, lag = [_NONE] * len(source), [0] * len(source)
    for op, needed in enumerate(source):
        if needed >= 0:
            user[needed] = op
            lag[needed] = source_lag[op]
    return user, lag
