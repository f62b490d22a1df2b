"""`jaxmorph train` with emulated slow links: longer steps, the same losses."""

import re

import pytest
from in_this_process import train

NUM_MICROBATCHES, LATENCY_MS, DECLARED_MS = 4, 60.0, 500.0
CONFIG = f"""
run: {{steps: 6, seed: 5}}
model: {{preset: tiny, width: 16, num_layers: 2, num_heads: 2, tied: false}}
data: {{sequence_length: 8}}
parallelism: {{stages: 2}}
batch: {{microbatches: {NUM_MICROBATCHES}, microbatch_size: 1}}
schedule: {{name: 1f1b}}
"""
# Messages hold both queues for their latency, one after another. All but the first activation and
# the last gradient may go in pairs, which hold them once.
SLOW_STEP_S = (NUM_MICROBATCHES + 1) * LATENCY_MS / 1e3
OP_MS = 15
STEP_S = 3 * NUM_MICROBATCHES * OP_MS / 1e3  # at least
CUT_S, HEALED_S = 2 * STEP_S, 2 * STEP_S + 1.5

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return train(tmp_path_factory.mktemp("healthy"), CONFIG)


def test_a_trace_slows_steps_and_declared_delays_are_planned(tmp_path, healthy):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        f"time_s,links,latency_ms,bandwidth_mbps,jitter_ms,cut\n0,0-1,{LATENCY_MS},,,\n"
    )
    declared = f"schedule={{name: adaptive, link_ms: {{0-1: {DECLARED_MS}}}}}"
    fixed = "adaptation.enabled=false"
    run = train(tmp_path, CONFIG, f"emulation.trace={trace}", declared, fixed)
    slow = run.steps
    assert min(line["step_s"] for line in healthy.steps) < SLOW_STEP_S
    assert all(line["step_s"] >= SLOW_STEP_S for line in slow)
    # The plan was made for the declared delay; a step is predicted by the measured ones.
    (adopted,) = run.events("plan_adopted")
    planned_ms = float(re.findall(r"([\d.]+) ms", adopted["detail"])[0])
    assert planned_ms >= (NUM_MICROBATCHES + 1) * DECLARED_MS
    assert slow[0]["predicted_step_s"] < planned_ms / 2e3


def test_a_cut_delegated_link_recovers(tmp_path, healthy):
    """Paced ops make the run long enough for a cut in its middle."""
    trace = tmp_path / "trace.csv"
    header = "time_s,links,latency_ms,bandwidth_mbps,jitter_ms,cut"
    trace.write_text(f"{header}\n{CUT_S},0-1,,,,1\n{HEALED_S},0-1,,,,0\n")
    op_ms = f"forward_ms: {OP_MS}, backward_input_ms: {OP_MS}, backward_weight_ms: {OP_MS}"
    paced = f"emulation.accelerator={{{op_ms}}}"
    cut = train(tmp_path, CONFIG, "routes.default=delegated", f"emulation.trace={trace}", paced)
    took_s = [line["step_s"] for line in cut.steps]
    assert sum(took_s) >= len(took_s) * STEP_S > CUT_S
    # A step that needs the link in the cut lasts until it heals. Only one that needs it no more
    # when the cut begins ends before, soon: then the next one does.
    assert max(took_s) >= (HEALED_S - CUT_S) / 2
    assert all(line["routes"] == {"0-1": "delegated"} for line in cut.steps)
    assert cut.results() == healthy.results()
