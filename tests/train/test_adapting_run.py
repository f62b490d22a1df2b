"""`jaxmorph train` with adaptation: it detects a slow link, and no result changes."""

import pytest
from in_this_process import jaxmorph, read_lines, train
from stopped_run import require_same_bits

STAGES, STEPS, SLOW_FROM, SLOW_TO, LATENCY_MS = 3, 23, 5, 11, 40
CONFIG = f"""
run: {{steps: {STEPS}, seed: 5}}
model: {{preset: tiny, width: 32, num_layers: 3, num_heads: 2, dropout: 0.1}}
data: {{sequence_length: 16}}
parallelism: {{stages: {STAGES}}}
batch: {{microbatches: 8, microbatch_size: 1}}
schedule: {{name: zb-h2}}
adaptation: {{worth: 0.25}}
optimizer: {{learning_rate: 1e-3}}
trace: {{every_steps: 0}}
"""
PACED = "emulation.accelerator={forward_ms: 12, backward_input_ms: 12, backward_weight_ms: 12}"
SLOW = (
    "emulation.links=[{between: [1, 2], "
    f"latency_ms: {LATENCY_MS}, from_step: {SLOW_FROM}, to_step: {SLOW_TO}}}]"
)
FLAPPING = "emulation.links=[{}]".format(
    ", ".join(
        f"{{between: [1, 2], latency_ms: {LATENCY_MS}, from_step: {step}, to_step: {step + 2}}}"
        for step in range(SLOW_FROM, STEPS, 4)
    )
)
CUT_TO, DIRECT_S = 7, 1.0
CUT = (
    "emulation.links=[{between: [1, 2], cut: true, route: direct, "
    f"from_step: {SLOW_FROM}, to_step: {CUT_TO}}}]"
)
FAILS_OVER = f"timeouts.direct_s={DIRECT_S}"
CLAIMED_MS = 40
CLAIM = f"schedule.link_ms={{0-1: {CLAIMED_MS}, 1-2: 0}}"  # of the wrong link: it changes nothing
DIRECT = {"0-1": "direct", "1-2": "direct"}
DELEGATED = {"0-1": "direct", "1-2": "delegated"}

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapting")
    return train(folder, CONFIG, "adaptation.enabled=true", PACED, SLOW, CLAIM)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same without adaptation and without delays, as fast as this machine computes it."""
    return train(tmp_path_factory.mktemp("undisturbed"), CONFIG)


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """The same with a direct path that fails in mid-step and recovers some steps later."""
    adapts = "adaptation={enabled: true, failback_steps: 2, worth: 0.25}"
    return train(tmp_path_factory.mktemp("failing"), CONFIG, adapts, PACED, CUT, FAILS_OVER)


@pytest.fixture(scope="module")
def flapping(tmp_path_factory):
    """The same with a link that is slow for a few steps, again and again."""
    folder = tmp_path_factory.mktemp("flapping")
    return train(folder, CONFIG, "adaptation.enabled=true", PACED, FLAPPING)


def in_force_ms(adapting, step):
    return 1e3 * adapting.steps[step]["predicted_step_s"]


def test_a_slow_link_is_detected_and_planned_for(adapting):
    found = adapting.events("straggler_detected")
    assert {event["link"] for event in found} == {"1-2"}
    assert {event["step"] for event in found[:2]} == {SLOW_FROM}
    first = adapting.events("plan_changed")[0]
    assert SLOW_FROM < first["step"] <= SLOW_FROM + 2
    assert first["detail"].startswith("link 1-2 takes 4")
    lines = adapting.steps
    assert lines[first["step"]]["schedule"] == "adaptive"
    before, after = (lines[step]["warmup_forwards"] for step in (SLOW_FROM, first["step"]))
    assert after[1] - after[2] > before[1] - before[2]  # the slack is where the delay is


@pytest.mark.long
@pytest.mark.in_ci
def test_adaptation_changes_no_bit_with_groups_of_w(tmp_path_factory):
    calm, slow = (
        train(tmp_path_factory.mktemp("grouped"), CONFIG, "schedule.weight_group=2", *more)
        for more in ((), ("adaptation.enabled=true", PACED, SLOW))
    )
    assert [event["link"] for event in slow.events("route_changed")] == ["1-2", "1-2"]
    require_same_bits(calm.out, slow.out, last=STEPS)


def test_detection_measures_and_ignores_declared_delays(adapting):
    stages = ("detected", "recovering", "cleared")
    judged = adapting.events(*(f"straggler_{stage}" for stage in stages))
    done = adapting.events("route_changed", "link_probed")
    assert {event["link"] for event in judged} == {event["link"] for event in done} == {"1-2"}
    assert max(event["evidence"]["evidence"]["baseline_ms"] for event in judged) < CLAIMED_MS / 2
    decided = adapting.events("plan_changed", "plan_kept")
    blamed = [verdict for event in decided for verdict in event["evidence"]["verdicts"]]
    assert {(each["source"], each["destination"]) for each in blamed} == {(1, 2), (2, 1)}
    claimed_ms = adapting.steps[0]["link_ms"]["0>1"], adapting.steps[0]["link_ms"]["1>0"]
    assert max(claimed_ms) < CLAIMED_MS / 2  # that link was healthy


def test_decisions_keep_their_evidence(adapting):
    found = adapting.events("straggler_detected")[0]["evidence"]
    assert found["latency_ms"] == pytest.approx(LATENCY_MS, abs=15)
    assert min(found["evidence"]["samples_ms"]) > found["evidence"]["threshold_ms"]
    morph = adapting.events("plan_changed")[0]["evidence"]
    assert morph["to"]["routes"] == DELEGATED
    assert morph["from"]["predicted_ms"] > 2 * morph["to"]["predicted_ms"]
    assert {verdict["health"] for verdict in morph["verdicts"]} == {"slow"}


def test_only_the_slow_link_is_delegated(adapting):
    changed = adapting.events("route_changed")
    assert [event["link"] for event in changed] == ["1-2", "1-2"]
    there, back = [event["step"] for event in changed]
    assert SLOW_TO < back <= SLOW_TO + 10
    lines = adapting.steps
    assert all(line["routes"] == DELEGATED for line in lines[there:back])
    others = lines[:SLOW_FROM] + lines[back:]
    assert all(line["routes"] == DIRECT and line["schedule"] == "zb-h2" for line in others)
    probed = adapting.events("link_probed")
    assert {event["link"] for event in probed} == {"1-2"}
    assert probed[-1]["detail"].startswith("the direct link is as fast as it was")
    cleared = adapting.events("straggler_cleared")
    assert {event["link"] for event in cleared} == {"1-2"}
    assert max(event["step"] for event in cleared) < probed[-1]["step"] < back
    assert adapting.events("plan_changed")[-1]["step"] == back


def test_the_slow_link_is_handed_over_in_mid_step(adapting):
    (handed_over,) = adapting.events("link_handed_over")
    assert (handed_over["step"], handed_over["link"]) == (SLOW_FROM, "1-2")
    there = adapting.events("plan_changed")[0]["step"]
    meanwhile = adapting.steps[SLOW_FROM:there]
    assert all(line["routes"] == DELEGATED for line in meanwhile)
    assert {line["schedule"] for line in meanwhile} == {"zb-h2"}


@pytest.mark.long
def test_a_slow_link_is_handed_over_where_ops_take_their_own_time(tmp_path, undisturbed):
    slow = "emulation.links=[{between: [1, 2], latency_ms: 100, from_step: 15}]"
    run = train(tmp_path, CONFIG, "adaptation.enabled=true", slow)
    handed_over = run.events("link_handed_over")
    assert ("1-2", 15) in [(event["link"], event["step"]) for event in handed_over]
    assert [line["loss"] for line in run.steps] == [line["loss"] for line in undisturbed.steps]


def test_predictions_follow_link_and_plan(adapting):
    there, back = [event["step"] for event in adapting.events("plan_changed")]
    healthy = in_force_ms(adapting, 0)
    assert healthy + 30 < in_force_ms(adapting, there) < 1.25 * healthy
    assert in_force_ms(adapting, back) == pytest.approx(healthy, rel=0.03)


def test_a_morph_compiles_nothing(adapting):
    assert len({line["compilations"] for line in adapting.steps}) == 1


@pytest.mark.long
def test_adaptation_changes_no_bit(adapting, undisturbed):
    require_same_bits(undisturbed.out, adapting.out, last=STEPS)
    assert not undisturbed.events("plan_changed", "straggler_detected")


def test_the_terminal_shows_every_event(adapting):
    for part in ("straggler detected 1-2", "plan changed", "route changed 1-2", "morphs    2, in"):
        assert part in adapting.shown


@pytest.mark.long
def test_a_failed_path_costs_no_step(failing, undisturbed):
    (failed,) = failing.events("link_failed")
    assert (failed["step"], failed["link"]) == (SLOW_FROM, "1-2")
    assert failed["evidence"]["held_up_s"] >= DIRECT_S
    assert failed["evidence"]["reported_by"] == [1, 2]
    require_same_bits(undisturbed.out, failing.out, last=STEPS)
    found = failing.events("straggler_detected")  # the failure is not measured as a delay
    assert [event for event in found if event["step"] <= SLOW_FROM + 2] == []


@pytest.mark.long
def test_a_failed_link_is_delegated_until_restored(failing):
    # On a busy machine the plan that delegates it may come too late for the path to be tried.
    back = min([event["step"] for event in failing.events("link_restored")], default=STEPS)
    assert back > CUT_TO + 2
    routes = [line["routes"] for line in failing.steps]
    assert routes == [
        *[DIRECT] * SLOW_FROM, *[DELEGATED] * (back - SLOW_FROM), *[DIRECT] * (STEPS - back),
    ]  # fmt: skip
    for changed in failing.events("route_changed")[:1]:
        assert "without a direct path there is no choice" in changed["detail"]
    assert failing.events("link_path_down", "link_given_up") == []


LONG_RUNS = [pytest.param(name, marks=pytest.mark.long) for name in ("failing", "flapping")]


@pytest.mark.parametrize("name", ["adapting", *LONG_RUNS])
def test_a_replay_makes_the_same_decisions(request, name):
    """A morph and its return; a path that fails and is restored; a link that flaps."""
    run = request.getfixturevalue(name)
    replayed = jaxmorph("replay", run.out)
    assert replayed.stdout.splitlines()[-1].endswith("decisions: the same as in the run")
    assert "plan_changed" in replayed.stdout


def test_a_replay_simulates_other_settings_from_the_first_difference(adapting, tmp_path):
    out = tmp_path / "replayed"
    words = "adaptation.worth=0.95", "--out", out
    replayed = jaxmorph("replay", adapting.out, *words).stdout.splitlines()
    assert f"wrote {out / 'report.html'}" in replayed
    steps = read_lines(out / "metrics.jsonl")
    assert [step["loss"] for step in steps] == [step["loss"] for step in adapting.steps]
    routes = [step["routes"] for step in steps]  # the link returns to its path, as the plan stays
    assert routes[:SLOW_FROM] + routes[SLOW_FROM + 4 :] == [DIRECT] * (STEPS - 4)
    planned_s = [step["predicted_step_s"] for step in steps]
    assert min(planned_s[SLOW_FROM + 3 : SLOW_TO]) > 1.2 * planned_s[-1]
    assert "; simulated from step" in replayed[-1]
    assert any(" ~ " in line for line in replayed)
    assert not any("~ plan_changed" in line for line in replayed)


def test_a_replay_takes_settings_of_adaptation_alone(adapting):
    refused = jaxmorph("replay", adapting.out, "run.steps=3")
    assert refused.returncode == 2
    assert refused.stderr == "error: replay: got run.steps=3, expected adaptation.KEY=VALUE\n"
