"""The cheapest set of values to keep between two halves of a computation: a minimum vertex cut."""

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

_UNLIMITED = float("inf")

Value = TypeVar("Value", bound=Hashable)


class ValueGraph(Generic[Value]):
    """Values with a price each, of which some are made early and some are used late.

    `cheapest_cut` chooses the values to hand over, so that everything used late can be had, at the
    lowest total price. It is a maximum flow (Edmonds and Karp, 1972) on the graph in which each
    value is two nodes, joined by an edge whose capacity is the value's price.
    """

    def __init__(self):
        self._values: dict[Value, None] = {}
        self._residual: dict[Any, dict[Any, float]] = defaultdict(dict)

    def add(self, value: Value, price: float) -> None:
        """Adds a value that costs `price` to hand over."""
        self._values[value] = None
        self._connect(("in", value), ("out", value), price)

    def made_early(self, value: Value, otherwise: float = _UNLIMITED) -> None:
        """Makes `value` in the early half; `otherwise` is what making it late would cost."""
        self._connect("early", ("in", value), otherwise)

    def made_late(self, value: Value, otherwise: float) -> None:
        """Would make `value` in the late half; `otherwise` is what making it early costs."""
        self._connect(("in", value), "late", otherwise)

    def used_late(self, *values: Value) -> None:
        """Requires the values in the late half."""
        for value in values:
            self._connect(("out", value), "late", _UNLIMITED)

    def depends(self, value: Value, *operands: Value) -> None:
        """Says that making `value` late takes `operands`, made late as well or handed over."""
        for operand in operands:
            self._connect(("out", operand), ("in", value), _UNLIMITED)

    def together(self, first: Value, second: Value) -> None:
        """Makes both values in the same half."""
        self._connect(("in", first), ("in", second), _UNLIMITED)
        self._connect(("in", second), ("in", first), _UNLIMITED)

    def cheapest_cut(self) -> list[Value]:
        """Returns the values to hand over, in the order in which they were added."""
        while "late" in (came_from := self._search()):
            self._augment(came_from)
        early = came_from
        return [v for v in self._values if ("in", v) in early and ("out", v) not in early]

    def _connect(self, tail: Any, head: Any, capacity: float) -> None:
        self._residual[tail][head] = self._residual[tail].get(head, 0) + capacity
        self._residual[head].setdefault(tail, 0)

    def _search(self) -> dict[Any, Any]:
        """Returns each node reachable from `early` over free capacity, with its predecessor."""
        came_from: dict[Any, Any] = {"early": None}
        queue = deque[Any](["early"])
        while queue:
            tail = queue.popleft()
            for head, capacity in self._residual[tail].items():
                if capacity > 0 and head not in came_from:
                    came_from[head] = tail
                    queue.append(head)
        return came_from

    def _augment(self, came_from: dict[Any, Any]) -> None:
        path: list[Any] = ["late"]
        while path[-1] != "early":
            path.append(came_from[path[-1]])
        edges = list(zip(path[1:], path, strict=False))
        flow = min(self._residual[tail][head] for tail, head in edges)
        if flow == _UNLIMITED:
            raise ValueError("a value made early and used late has no price")
        for tail, head in edges:
            self._residual[tail][head] -= flow
            self._residual[head][tail] += flow
