"""``jaxmorph plan --layers-cost``: the best cut of layers into stages, and the even cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxmorph.cli.plan_options import numbers
from jaxmorph.control.answer import Answer
from jaxmorph.errors import UserError, quoted
from jaxmorph.schedule.partition import even_cut, partition, stage_times_ms
from jaxmorph.schedule.problem import count, duration_ms, durations_ms

_KINDS = ("forward_ms", "backward_input_ms", "backward_weight_ms")


@dataclass(frozen=True)
class LayerCut:
    """Layers' costs, and two cuts of them into stages.

    Args:
        layer_costs_ms: Time of F of each layer; `embedding_ms` and `head_ms` are of F too.
        ratios: The times of F, B and W as multiples of F.
        layers: The number of layers of each stage under the best cut.
        even: The same under the even cut.
    """

    layer_costs_ms: tuple[float, ...]
    embedding_ms: float
    head_ms: float
    ratios: tuple[float, ...]
    layers: tuple[int, ...]
    even: tuple[int, ...]

    def forward_ms(self, layers: Sequence[int]) -> tuple[float, ...]:
        """Time of F of each stage under a cut."""
        return stage_times_ms(layers, self.layer_costs_ms, self.embedding_ms, self.head_ms)

    def slowest_ms(self, layers: Sequence[int]) -> float:
        """Time of one microbatch on the slowest stage under a cut: its F, B and W."""
        return max(self.forward_ms(layers)) * sum(self.ratios)

    def to_json(self) -> dict[str, Any]:
        """The fields that ``jaxmorph plan --json`` adds to its answer."""
        return {
            "layers": list(self.layers),
            "slowest_stage_ms": self.slowest_ms(self.layers),
            "even_layers": list(self.even),
            "even_slowest_stage_ms": self.slowest_ms(self.even),
        }


def parse_layers(options: Mapping[str, Any], fields: Mapping[str, Any]) -> LayerCut:
    """Cut the layers that ``--layers-cost`` and its companion options describe.

    Args:
        fields: The problem's fields; the ratios of F, B and W come from its costs, one number each.

    Raises:
        UserError: An option is wrong.
    """
    num_stages = count("num_stages", fields["num_stages"])
    costs_ms = _layer_costs_ms(options["layers_cost"])
    embedding_ms = duration_ms("embedding_cost", options.get("embedding_cost", 0.0))
    head_ms = duration_ms("head_cost", options.get("head_cost", 0.0))
    try:
        layers = partition(costs_ms, embedding_ms, head_ms, num_stages)
    except ValueError as error:
        raise UserError(str(error)) from error
    even = even_cut(len(costs_ms), num_stages)
    return LayerCut(costs_ms, embedding_ms, head_ms, _ratios(fields), layers, even)


def cut_fields(cut: LayerCut, layers: Sequence[int]) -> dict[str, list[float]]:
    """The stages' costs under a cut, as a problem's fields."""
    forward_ms = cut.forward_ms(layers)
    return {
        kind: [time_ms * ratio for time_ms in forward_ms]
        for kind, ratio in zip(_KINDS, cut.ratios, strict=True)
    }


def print_cut(cut: LayerCut, answer: Answer, even: Answer, console: Console) -> None:
    """Print both cuts, with their slowest stages and their planned steps."""
    for name, layers, planned in (("layers", cut.layers, answer), ("even cut", cut.even, even)):
        slowest = f"slowest stage {cut.slowest_ms(layers):,.1f} ms a microbatch"
        makespan = f"makespan {planned.timeline.makespan_ms:,.1f} ms"
        value = " ".join(map(str, layers))
        line = Text.assemble(f"{name:<13}", (value, "bold"), (f"  {slowest}, {makespan}", "dim"))
        console.print(line, soft_wrap=True)


def _layer_costs_ms(text: str) -> tuple[float, ...]:
    costs = numbers(text)
    values = costs if isinstance(costs, list) else [costs]
    return durations_ms("layers_cost", values, len(values), "layer")


def _ratios(fields: Mapping[str, Any]) -> tuple[float, ...]:
    for kind in _KINDS:
        if not isinstance(fields[kind], int | float):
            raise UserError(f"{kind}: got {quoted(fields[kind])}, expected one number")
    forward_ms = duration_ms("forward_ms", fields["forward_ms"])
    if forward_ms == 0:
        raise UserError("forward_ms: got 0, expected a number of ms above 0")
    return tuple(duration_ms(kind, fields[kind]) / forward_ms for kind in _KINDS)
