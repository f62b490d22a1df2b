"""`jaxmorph train` with adaptation: nobody tells it of a slow link, and no result changes."""

import json

import jax
import pytest
from in_this_process import jaxmorph

from jaxmorph.checkpoints.folder import CheckpointFolder, stage_path
from jaxmorph.checkpoints.tree_files import TreeFiles

STAGES, STEPS, SLOW_FROM, SLOW_TO, LATENCY_MS = 3, 28, 6, 14, 40
CONFIG = f"""
run: {{steps: {STEPS}, seed: 5}}
model: {{preset: tiny, width: 32, num_layers: 3, num_heads: 2}}
data: {{sequence_length: 16}}
parallelism: {{stages: {STAGES}}}
batch: {{microbatches: 8, microbatch_size: 1}}
schedule: {{name: zb-h2}}
optimizer: {{learning_rate: 1e-3}}
trace: {{every_steps: 0}}
"""
PACED = "emulation.accelerator={forward_ms: 12, backward_input_ms: 12, backward_weight_ms: 12}"
SLOW = (
    "emulation.links=[{between: [1, 2], "
    f"latency_ms: {LATENCY_MS}, from_step: {SLOW_FROM}, to_step: {SLOW_TO}}}]"
)
DIRECT = {"0-1": "direct", "1-2": "direct"}
DELEGATED = {"0-1": "direct", "1-2": "delegated"}

pytestmark = pytest.mark.multiprocess


class Finished:
    """What a run has written."""

    def __init__(self, folder, *overrides):
        path, self.out = folder / "run.yaml", folder / "out"
        path.write_text(CONFIG)
        done = jaxmorph("train", path, f"run.dir={self.out}", *overrides)
        assert done.returncode == 0, done.stderr
        self.shown = done.stdout

    def lines(self, name):
        return [json.loads(line) for line in (self.out / name).read_text().splitlines()]

    @property
    def steps(self):
        return self.lines("metrics.jsonl")

    def events(self, *kinds):
        return [event for event in self.lines("events.jsonl") if event["kind"] in kinds]

    def results(self):
        return [(line["loss"], line["grad_norm"]) for line in self.steps]

    def state(self):
        """The bits of all parameters, and of the optimizer's state, of all stages in the end."""
        checkpoint = CheckpointFolder(self.out / "checkpoints").finished(STEPS)
        trees = [TreeFiles().read(stage_path(checkpoint, stage)) for stage in range(STAGES)]
        return jax.tree.map(lambda leaf: leaf.tobytes(), trees)


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapting")
    return Finished(folder, "adaptation.enabled=true", PACED, SLOW)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same without adaptation and without delays, as fast as this machine computes it."""
    return Finished(tmp_path_factory.mktemp("undisturbed"))
