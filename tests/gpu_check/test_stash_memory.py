import pytest

from jaxmorph.gpu_check.stash_memory import KeptBytes, MemoryReport

MIB = 1 << 20


@pytest.mark.parametrize(
    ("compiled", "held", "agree"),
    [
        (100 * MIB, None, True),
        (101 * MIB, 99.0 * MIB, True),
        (110 * MIB, 100.0 * MIB, False),
        (100 * MIB, 190.0 * MIB, True),
        (100 * MIB, 95.0 * MIB, False),
    ],
    ids=["not told", "rounded", "compiled", "held in larger chunks", "not all held"],
)
def test_the_plan_must_count_on_what_a_microbatch_really_keeps(compiled, held, agree):
    kept = KeptBytes(100 * MIB, compiled, held)
    assert kept.agree == agree
    report = MemoryReport("sizes", kept, KeptBytes(MIB, MIB, None), {"F": MIB}, peak_bytes=None)
    verdicts = [row.holds for row in report.rows() if row.holds is not None]
    assert verdicts == [agree, True]
