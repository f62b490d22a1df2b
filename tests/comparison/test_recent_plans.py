"""What a system that adapts is told under a trace, and when it plans anew."""

from jaxmorph.comparison.condition_links import RoundLinks
from jaxmorph.comparison.condition_plans import RECENT_S, Replanner
from jaxmorph.transport.link_emulator import LinkCondition

STEADY = LinkCondition((2, 3), 5.0)


class RecordingPlanner:
    def __init__(self):
        self.told = []

    def make(self, conditions):
        self.told.append(conditions)
        return f"plan {len(self.told)}", None


def replanner(*traced: LinkCondition) -> tuple[Replanner, list]:
    planner = RecordingPlanner()
    links = RoundLinks((STEADY,), traced)
    return Replanner(planner, links), planner.told  # pyright: ignore[reportArgumentType]


def test_an_event_is_planned_for_from_the_step_after_its_first_and_again_when_it_is_over():
    replan, told = replanner(LinkCondition((0, 1), 30.0, from_step=10, to_step=13))
    plans = [replan(step, 0.5 * step) for step in range(8, 16)]
    assert plans == [None, None, None, "plan 1", None, None, "plan 2", None]
    slow = (LinkCondition((0, 1), 30.0, source=0), LinkCondition((0, 1), 30.0, source=1))
    assert told == [(STEADY, *slow), (STEADY,)]


def test_delays_of_the_last_seconds_are_told_and_none_of_the_future():
    first = LinkCondition((0, 1), 100.0, from_s=0.0, to_s=1.0, source=0)
    second = LinkCondition((0, 1), 20.0, from_s=1.0, to_s=30.0, source=0)
    third = LinkCondition((0, 1), 900.0, from_s=30.0, source=0)
    replan, told = replanner(first, second, third)
    assert replan(0, 0.0) is None
    assert replan(1, 1.0) == "plan 1"
    assert replan(2, 1.0 + RECENT_S) == "plan 2"
    assert replan(9, 30.0) is None
    assert [each[1:] for each in told] == [
        (LinkCondition((0, 1), 100.0, source=0),),
        (LinkCondition((0, 1), 20.0, source=0),),
    ]


def test_a_plan_stays_while_what_it_is_for_has_hardly_changed():
    delays_ms = (40.0, 43.9, 50.0, 50.5)
    replan, _ = replanner(
        *(
            LinkCondition((0, 1), delay_ms, from_step=step, to_step=step + 1)
            for step, delay_ms in enumerate(delays_ms)
        )
    )
    assert [replan(step, 0.0) for step in range(1, 5)] == ["plan 1", None, "plan 2", None]
