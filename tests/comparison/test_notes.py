from jaxmorph.comparison.matrix_record import comparison_notes
from jaxmorph.config import Config


def test_a_reader_is_told_what_is_needed_to_judge_and_to_repeat_it():
    tree = {
        "emulation": {
            "accelerator": {"forward_ms": 10.0, "backward_input_ms": 9.0, "backward_weight_ms": 8.0}
        },
        "compare": {
            "systems": ["zb", "zb-delegated"],
            "conditions": [{"name": "healthy"}],
            "steps": 5,
            "repeats": 3,
            "largest_spread": 1.25,
        },
    }
    config = Config.model_validate(tree)
    assert config.compare is not None
    notes = comparison_notes(config, config.compare, "jaxmorph compare x.yaml")
    assert notes["systems"].startswith("zb: zero bubbles while links are healthy; zb-delegated: ")
    assert "paced: F 10 ms, B 9 ms, W 8 ms" in notes["regime"]
    assert "'holds queues'" in notes["regime"]
    assert "'overlaps'" in notes["regime"]
    assert "3 rounds of 5 steps a condition" in notes["steps"]
    assert "above 1.25" in notes["steps"]
    assert notes["command"] == "`jaxmorph compare x.yaml`"
    assert "jax " in notes["versions"]
    assert len(notes["load at the start"].split()) > 3
    assert "left aside" not in notes


def test_what_the_configuration_says_for_other_commands_is_named():
    tree = {
        "parallelism": {"stages": 4},
        "routes": {"2-3": "delegated"},
        "schedule": {"link_ms": {"2-3": 30}},
        "emulation": {"links": [{"between": [2, 3], "latency_ms": 30}]},
        "data": {"held_out_fraction": 0.1},
        "evaluation": {"every_steps": 5},
        "compare": {"conditions": [{"name": "healthy"}], "profiling_steps": 0},
    }
    config = Config.model_validate(tree)
    assert config.compare is not None
    notes = comparison_notes(config, config.compare, "jaxmorph compare x.yaml")
    assert notes["left aside"].startswith(
        "routes, schedule.link_ms, emulation.links, evaluation: systems "
    )
    assert notes["steps"].startswith("planned and predicted from warm-up; ")


def test_traces_are_named_with_what_they_mean_for_the_table():
    of_regime = {"name": "A", "trace": {"regime": "A", "seed": 3}}
    of_file = {"name": "mine", "trace": {"file": "x.csv", "time_scale": 0.2, "latency_scale": 0.5}}
    tree = {"compare": {"conditions": [{"name": "healthy"}, of_regime, of_file]}}
    config = Config.model_validate(tree)
    assert config.compare is not None
    notes = comparison_notes(config, config.compare, "jaxmorph compare x.yaml")
    assert notes["traces"].startswith(
        "A: regime A, seed 3; mine: x.csv, times or steps times 0.2, delays times 0.5; begun anew"
    )


def test_whole_runs_are_told_as_such():
    compare = {"systems": ["restart"], "conditions": [{"name": "cut"}], "steps": 40}
    tree = {"compare": compare, "checkpoint": {"every_steps": 10}}
    config = Config.model_validate(tree)
    assert config.compare is not None
    notes = comparison_notes(config, config.compare, "jaxmorph compare x.yaml")
    assert notes["steps"].startswith("each system under each condition is a run of 40 steps")
    assert "restart: 1f1b that starts again" in notes["systems"]
