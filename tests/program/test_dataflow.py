import pytest

from jaxmorph.placement import Placement
from jaxmorph.program.dataflow import (
    flows,
    last_uses,
    received_buffer,
    result_buffer,
    sent_buffer,
    uses,
)
from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Payload,
    RankInstructions,
    Receive,
    Run,
    Send,
    Transfer,
    Update,
)
from jaxmorph.schedule.ops import Op, OpKind


def buffers_of(op, place, pipeline):
    """What an op reads and fills at a place of the pipeline."""
    rank, chunk = place
    run = Run(Op.parse(op)._replace(chunk=chunk))
    ((read, made),) = uses(RankInstructions(rank, pipeline[0], 9, (run,), pipeline[1]))
    return set(read), set(made)


def test_activations_go_to_the_next_stage_and_gradients_back():
    sent = [str(flow.transfers(5)[4]) for flow in flows(Placement(3))]
    assert sent == ["activation[4] 0>1", "gradient[4] 1>0", "activation[4] 1>2", "gradient[4] 2>1"]


def test_the_last_rank_sends_to_the_next_chunk():
    sent = [str(flow.transfers(5)[4]) for flow in flows(Placement(3, num_chunks=2))]
    assert sent == [
        "activation[4] 0>1", "gradient[4] 1>0", "activation[4] 1>2", "gradient[4] 2>1",
        "activation[4] 2>0", "1.gradient[4] 0>2",
        "1.activation[4] 0>1", "1.gradient[4] 1>0", "1.activation[4] 1>2", "1.gradient[4] 2>1",
    ]  # fmt: skip


@pytest.mark.parametrize("pipeline", [Placement(2), Placement(5), Placement(2, 3), Placement(3, 2)])
def test_a_flow_goes_from_what_an_op_fills_to_what_the_same_op_reads(pipeline):
    ops = {Payload.ACTIVATION: ["F4"], Payload.GRADIENT: ["B4", "BW4"]}
    for flow in flows(pipeline):
        message = flow.transfers(5)[4]
        for op in ops[flow.payload]:
            assert sent_buffer(message) in buffers_of(op, flow.source, pipeline)[1]
            assert received_buffer(message, pipeline) in buffers_of(op, flow.target, pipeline)[0]


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
    def buffers(names):
        return {Buffer(BufferKind(name), 1) for name in names.split()}

    assert buffers_of(op, (rank, 0), Placement(3)) == (buffers(read), buffers(written))


@pytest.mark.parametrize(
    ("op", "chunk", "read", "written"),
    [
        ("F2", 0, "", "stash[2] 1.input[2]"),
        ("F2", 1, "1.input[2]", "1.stash[2]"),
        ("BW2", 1, "1.stash[2]", "output-gradient[2]"),
        ("BW2", 0, "stash[2] output-gradient[2]", ""),
    ],
)
def test_one_rank_passes_results_between_chunks(op, chunk, read, written):
    alone = Placement(1, num_chunks=2)
    found = buffers_of(op, (0, chunk), alone)
    assert [set(map(str, each)) for each in found] == [set(read.split()), set(written.split())]


@pytest.mark.parametrize(
    ("text", "chunk"),
    [
        ("1.activation[0] 0>1", 1),
        ("1.gradient[0] 1>0", 1),
        ("1.activation[0] 3>0", 2),
        ("1.gradient[0] 0>3", 0),
        ("tied[0] 0>3", 0),
        ("tied[0] 3>0", 0),
    ],
)
def test_a_wrapped_transfer_is_for_the_next_chunk(text, chunk):
    transfer = Transfer.parse(text)
    assert received_buffer(transfer, Placement(4, num_chunks=3)).chunk == chunk


def test_a_v_hands_over_at_its_turn_and_sends_elsewhere():
    in_a_v = Placement(2, 2, "v")
    results = [
        result_buffer(Op.parse(op), rank, in_a_v)
        for op, rank in [("F3", 0), ("F3", 1), ("1.F3", 1), ("1.F3", 0), ("1.B3", 1), ("B3", 1)]
    ]
    assert [*map(str, results)] == [
        "output[3]", "1.input[3]", "1.output[3]", "None", "output-gradient[3]", "input-gradient[3]",
    ]  # fmt: skip
    assert [str(flow.transfers(4)[3]) for flow in flows(in_a_v) if not flow.is_handover] == [
        "activation[3] 0>1", "gradient[3] 1>0", "1.activation[3] 1>0", "1.gradient[3] 0>1",
    ]  # fmt: skip


@pytest.mark.parametrize("pipeline", [Placement(1, 2), Placement(3), Placement(3, 2)])
def test_a_result_is_what_an_op_fills_for_others(pipeline):
    for flow in flows(pipeline):
        op = Op(OpKind.F if flow.payload is Payload.ACTIVATION else OpKind.BW, 2, flow.source.chunk)
        result = result_buffer(op, flow.source.rank, pipeline)
        assert result in buffers_of(str(op), flow.source, pipeline)[1]
    assert (
        result_buffer(Op(OpKind.F, 2, pipeline.num_chunks - 1), pipeline[0] - 1, pipeline) is None
    )
    assert result_buffer(Op(OpKind.B, 2), 0, pipeline) is None


def test_each_buffer_is_freed_after_its_last_use():
    activation, gradient = (
        Transfer(payload, source, 1, 0)
        for payload, source in ((Payload.ACTIVATION, 0), (Payload.GRADIENT, 2))
    )
    steps = [
        (Receive(activation), ""), (Run(Op.parse("F0")), "input"),
        (Send(activation._replace(source=1, destination=2)), "output"),
        (Receive(gradient), ""), (Run(Op.parse("B0")), "stash output-gradient"),
        (Send(gradient._replace(source=1, destination=0)), "input-gradient"),
        (Run(Op.parse("W0")), "weight-stash"), (Update(), ""),
    ]  # fmt: skip
    freed = last_uses(RankInstructions(1, 3, 1, tuple(step for step, _ in steps)))
    named = [{buffer.kind.value for buffer in of_step} for of_step in freed]
    assert named == [set(names.split()) for _, names in steps]


def test_what_nothing_reads_is_freed_at_once():
    program = RankInstructions(0, 2, 1, (Run(Op.parse("F0")),))
    assert [*map(set, last_uses(program))] == [
        {Buffer(BufferKind.STASH, 0), Buffer(BufferKind.OUTPUT, 0)}
    ]
