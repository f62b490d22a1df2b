from jaxmorph.control.tolerance import absorbed
from jaxmorph.control.verdicts import Evidence, LinkHealth, Verdict
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.slackness import tolerated_latency_ms

NO_EVIDENCE = Evidence((), 0.0, 0.0, 0.0)


def verdict(latency_ms):
    return Verdict(1, 2, LinkHealth.SLOW, latency_ms, 0.0, 7, NO_EVIDENCE, "")


def test_a_plan_absorbs_what_equation_1_says_and_no_more():
    tolerated_ms = tolerated_latency_ms(StageCosts.uniform(4, 10, 10, 10), [10, 7, 4, 1])[1]
    assert tolerated_ms == 20.0
    assert absorbed(verdict(20.0), tolerated_ms) == (
        True,
        "link 1>2 takes 20.0 ms a message, the plan absorbs 20.0",
    )
    assert absorbed(verdict(20.5), tolerated_ms) == (
        False,
        "link 1>2 takes 20.5 ms a message, the plan absorbs only 20.0",
    )


def test_no_slackness_absorbs_what_holds_queues():
    answer = absorbed(verdict(1.0), 50.0, holds_queue=True)
    assert not answer.absorbed
    assert answer.reason == (
        "link 1>2 takes 1.0 ms a message and holds both ends' queues: no slackness absorbs that"
    )
