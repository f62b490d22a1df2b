import re

from jaxmorph.reporting.page.gantt import draw_gantt
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import interleaved, one_forward_one_backward, zb_h2
from jaxmorph.schedule.simulate import simulate


def _simulated(stages: int, microbatches: int):
    return simulate(zb_h2(stages, microbatches), StageCosts.uniform(stages, 10.0, 10.0, 10.0))


def test_every_op_is_a_box_with_its_microbatch_and_every_bubble_has_its_cause(parse):
    page = parse(draw_gantt(_simulated(2, 3), 120.0, "two stages", step_ms=118.0))
    for kind in ("op-F", "op-B", "op-W"):
        (path,) = page.named("path", kind)
        assert path.attributes["d"].count("z") == 6
    assert page.texts("text", "microbatch").count("2") == 6
    assert {look for tag in page.named("path") for look in tag.looks if "idle" in look} == {
        "idle-warm-up", "idle-cool-down", "idle-optimizer",
    }  # fmt: skip
    (picture,) = page.named("svg")
    assert picture.attributes["aria-label"] == "two stages"


def test_widths_stand_for_milliseconds(parse):
    html = draw_gantt(_simulated(1, 1), 60.0, "one stage")
    boxes = [tag.attributes["d"] for tag in parse(html).named("path") if "op-" in tag.looks[0]]
    ends = [re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", box)[0] for box in boxes]
    assert ends == [("26", "190.7"), ("190.7", "355.3"), ("355.3", "520")]  # half of 60 ms


def test_chunks_are_shades_of_their_kind(parse):
    timeline = simulate(interleaved(2, 2, 2), StageCosts.uniform(2, 10.0, 10.0, 10.0))
    paths = parse(draw_gantt(timeline, 60.0, "chunks")).named("path", "op-F")
    shades = [path.attributes["fill-opacity"] for path in paths]
    assert sorted(shades) == ["0.50", "1.00"]


def test_a_wide_pipeline_is_low_without_numbers_and_small(parse):
    costs = StageCosts.uniform(32, 10.0, 10.0, 10.0)
    timeline = simulate(one_forward_one_backward(32, 64), costs)
    html = draw_gantt(timeline, timeline.makespan_ms, "wide")
    page = parse(html)
    assert page.texts("text", "microbatch") == []
    height = float(page.named("svg")[0].attributes["viewbox"].split()[3])
    assert height < 250
    assert len(html) < 350_000
