import pytest

from jaxmorph.program.dataflow import feeder, output_transfer, reads, received_buffer, writes
from jaxmorph.program.instructions import Buffer, BufferKind, Pipeline, Run
from jaxmorph.schedule.ops import Op


@pytest.mark.parametrize(
    ("op", "rank", "expected"),
    [
        ("F4", 0, "activation[4] 0>1"),
        ("F4", 2, "None"),
        ("B4", 2, "gradient[4] 2>1"),
        ("BW4", 1, "gradient[4] 1>0"),
        ("B4", 0, "None"),
        ("W4", 1, "None"),
    ],
)
def test_an_op_sends_to_the_neighbours_same_op(op, rank, expected):
    assert str(output_transfer(Op.parse(op), rank, Pipeline(3))) == expected


@pytest.mark.parametrize(
    ("op", "rank", "expected"),
    [
        ("F4", 1, "activation[4] 1>2"),
        ("F4", 2, "activation[4] 2>0"),
        ("1.F4", 1, "1.activation[4] 1>2"),
        ("1.F4", 2, "None"),
        ("1.B4", 1, "1.gradient[4] 1>0"),
        ("1.BW4", 0, "1.gradient[4] 0>2"),
        ("B4", 1, "gradient[4] 1>0"),
        ("B4", 0, "None"),
    ],
)
def test_the_last_rank_sends_to_the_next_chunk(op, rank, expected):
    assert str(output_transfer(Op.parse(op), rank, Pipeline(3, num_chunks=2))) == expected


@pytest.mark.parametrize(
    ("op", "rank", "rank_before", "op_before"),
    [("F4", 1, 0, "F4"), ("1.F4", 0, 2, "F4"), ("1.B4", 1, 2, "1.B4"), ("BW4", 2, 0, "1.BW4")],
)
def test_the_feeder_sends_what_an_op_reads(op, rank, rank_before, op_before):
    pipeline = Pipeline(3, num_chunks=2)
    assert feeder(Op.parse(op), rank, pipeline) == (rank_before, Op.parse(op_before))
    message = output_transfer(Op.parse(op_before), rank_before, pipeline)
    assert message is not None
    assert received_buffer(message) in reads(Run(Op.parse(op)), rank, pipeline)


@pytest.mark.parametrize(("op", "rank"), [("F4", 0), ("1.B4", 2), ("W4", 1)])
def test_the_ends_of_the_pipeline_have_no_feeder(op, rank):
    assert feeder(Op.parse(op), rank, Pipeline(3, num_chunks=2)) is None


@pytest.mark.parametrize(
    ("op", "rank", "read", "written"),
    [
        ("F1", 0, "", "stash output"),
        ("F1", 1, "input", "stash output"),
        ("F1", 2, "input", "stash"),
        ("B1", 0, "stash output-gradient", "weight-stash"),
        ("B1", 1, "stash output-gradient", "input-gradient weight-stash"),
        ("B1", 2, "stash", "input-gradient weight-stash"),
        ("W1", 1, "weight-stash", ""),
        ("BW1", 1, "stash output-gradient", "input-gradient"),
    ],
)
def test_buffers_depend_on_the_place_in_the_pipeline(op, rank, read, written):
    run = Run(Op.parse(op))

    def buffers(names):
        return {Buffer(BufferKind(name), 1) for name in names.split()}

    assert set(reads(run, rank, Pipeline(3))) == buffers(read)
    assert set(writes(run, rank, Pipeline(3))) == buffers(written)


@pytest.mark.parametrize(
    ("op", "read", "written"),
    [
        ("F2", "", "stash[2] 1.input[2]"),
        ("1.F2", "1.input[2]", "1.stash[2]"),
        ("1.BW2", "1.stash[2]", "output-gradient[2]"),
        ("BW2", "stash[2] output-gradient[2]", ""),
    ],
)
def test_one_rank_passes_results_between_chunks(op, read, written):
    run, alone = Run(Op.parse(op)), Pipeline(1, num_chunks=2)
    assert set(map(str, reads(run, 0, alone))) == set(read.split())
    assert set(map(str, writes(run, 0, alone))) == set(written.split())
    assert output_transfer(Op.parse(op), 0, alone) is None
