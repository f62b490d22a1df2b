import random

from jaxmorph.transport.link_emulator import DirectionConditions, LinkCondition, Spans


def test_a_span_holds_from_its_begin_until_before_its_end():
    spans = Spans([(1.0, 2.0, "a"), (None, 1.5, "b"), (2.0, None, "c"), (3.0, 3.0, "never")])
    assert list(spans.bounds) == [1.0, 1.5, 2.0, 3.0]
    held = [list(spans.at(moment)) for moment in (-9.0, 1.0, 1.5, 2.0, 3.0, 1e9)]
    assert held == [["b"], ["a", "b"], ["a"], ["c"], ["c"], ["c"]]


def test_nothing_holds_where_there_is_nothing():
    assert list(Spans([]).at(0.0)) == []


def test_the_conditions_that_are_found_are_those_that_say_that_they_hold():
    chance = random.Random(7)

    def span() -> tuple[int | None, int | None]:
        first, end = sorted((chance.randint(0, 12), chance.randint(0, 12)))
        return chance.choice((first, first, None)), chance.choice((end, end, None))

    conditions = []
    for number in range(60):
        (from_step, to_step), (from_s, to_s) = span(), span()
        if number % 3 == 0:
            from_s = to_s = None
        if number % 3 == 1:
            from_step = to_step = None
        conditions.append(
            LinkCondition(
                (0, 1),
                latency_ms=float(number),
                from_step=from_step,
                to_step=to_step,
                from_s=from_s,
                to_s=to_s,
            )
        )
    index = DirectionConditions(conditions)
    for step in range(-1, 14):
        for elapsed_s in (-0.5, 0.0, 0.5, 3.0, 7.0, 11.99, 12.0, 100.0):
            held = sorted(index.holding(step, elapsed_s), key=lambda each: each.latency_ms)
            assert held == [each for each in conditions if each.holds(step, elapsed_s)]
