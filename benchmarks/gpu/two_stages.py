"""Two processes train as two stages, and are compared with one device.

On one GPU all their messages are delegated, by sidecars of their own: NCCL refuses two processes on
one GPU. So JAX doesn't join them either; they meet by a folder. With two GPUs their link is direct.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gpu.child import Row
from benchmarks.gpu.stage import Sizes, build_gpt2, is_small
from jaxmorph.program.check import check
from jaxmorph.program.instructions import RankInstructions
from jaxmorph.program.lowering import lower
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link, Route
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.launcher import run_ranks
from jaxmorph.runtime.link_connections import open_data_plane
from jaxmorph.runtime.payloads import channel_specs
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.rendezvous import HostRendezvous, Rendezvous
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.mesh import make_mesh
from jaxmorph.stage.model import MicrobatchShapes, Params, PipelineModel
from jaxmorph.stage.parameters import init_stage_params, leaf_at, with_leaf
from jaxmorph.transport.secret import inherited_secret

LARGE = Sizes(512, 8, num_layers=4, sequence_length=256, microbatch_size=2, vocab_size=1024)
SMALL = Sizes(16, 2, num_layers=2, sequence_length=8, microbatch_size=2, vocab_size=32)

SCALAR_TOLERANCE = 1e-5
"""Of losses and norms, relatively. Sums of float32 in another order differ by about 1e-6."""

GRADIENT_TOLERANCE = 1e-4
"""Of each gradient's largest element. Products in TF32, for one, differ by about 1e-3."""

_NUM_STAGES, _MICROBATCHES, _STEPS = 2, 4, 10
_LINK = Link(0, 1)
_SCHEDULE = "zb-h2"
_RATE = 0.1  # of plain SGD: an update is as far off as its gradient, and rounding stays rounding
_UNCOUNTED = 3  # steps that are not timed
_WITHIN_S, _MEET_S, _TRANSFER_S = 90.0, 60.0, 20.0
_PAUSE_S = 0.01


def compare_two_stages(route: Route = "delegated", *, small: bool) -> Iterator[Row]:
    """Train a model in two processes, and on one device in plain JAX, and compare."""
    sizes = SMALL if is_small(small) else LARGE
    yield Row("model", "float32", str(sizes))
    messages: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="jaxmorph-", ignore_cleanup_errors=True) as name:
        folder, words = Path(name), [name, "small" if is_small(small) else "large", route]
        try:
            run_ranks(
                "benchmarks.gpu.two_stages", words, _NUM_STAGES, folder,
                lambda message: messages.update({message["rank"]: message}), within_s=_WITHIN_S,
            )  # fmt: skip
        except Exception:
            for log in sorted(folder.glob("rank_*.log")):  # they go with the folder
                sys.stderr.write(f"{log.name}:\n{log.read_text(errors='replace')}\n")
            raise
        stages = [messages[stage] for stage in range(_NUM_STAGES)]
        gradients = [_read_arrays(folder, stage) for stage in range(_NUM_STAGES)]
    plain = train_plainly(sizes)
    yield from compare(stages[0], gradients, plain)
    step_ms = max(stage["step_ms"] for stage in stages)
    note = f"{plain['step_ms']:.1f} ms on one device, in plain JAX"
    yield Row("a step", f"{step_ms:.1f} ms", note, None, {"ms": step_ms})
    for stage, own in enumerate(stages):
        yield Row(f"stage {stage}: no op to run", f"{own['waiting']:.0%}", "of a step")
        if copies := own["copies"]:
            note = f"into slots; out of slots by {copies[1]}"
            yield Row(f"stage {stage}: copies by", copies[0], note)


def compare(
    got: Mapping[str, Any], gradients: Sequence[Mapping[str, np.ndarray]], plain: Mapping[str, Any]
) -> Iterator[Row]:
    """How far two stages' training is from that of one device.

    Args:
        got: `losses` and `norms` of every step, the same on both stages.
        gradients: Each stage's, of the first step, which begins from the same parameters.
        plain: `losses`, `norms` and `gradients` of one device.

    Raises:
        ValueError: If a stage has other gradients than its part of the model.
    """
    for name in ("losses", "norms"):
        pairs = zip(got[name], plain[name], strict=True)
        worst = float(np.max([abs(one / other - 1) for one, other in pairs]))  # NaN if any is
        note = f"at most {SCALAR_TOLERANCE:g}, the worst of {len(plain[name])} steps"
        holds = bool(worst <= SCALAR_TOLERANCE)
        yield Row(name, f"{worst:.1e}", note, holds, {"worst": worst})
    off = {}
    for stage, (own, wanted) in enumerate(zip(gradients, plain["gradients"], strict=True)):
        if own.keys() != wanted.keys():
            raise ValueError(f"got gradients of {sorted(own)}, expected {sorted(wanted)}")
        for name, gradient in wanted.items():
            due = np.float64(gradient)
            error = float(np.max(np.abs(own[name] - due)) / np.max(np.abs(due)))
            off[f"stage {stage}, {name}"] = error
    where = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    note = f"at most {GRADIENT_TOLERANCE:g}, of {len(off)}: {where}"
    holds = bool(off[where] <= GRADIENT_TOLERANCE)
    yield Row("worst gradient", f"{off[where]:.1e}", note, holds, {"worst": off[where]})


def _batch_of(sizes: Sizes, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A step's tokens and targets, int32 [microbatches, microbatch size, sequence] each.

    Some tokens are far more frequent than others, so that there is something to learn.
    """
    shape = (_MICROBATCHES, sizes.microbatch_size, sizes.sequence_length + 1)
    ids = (np.random.default_rng(step).random(shape) ** 4 * sizes.vocab_size).astype(np.int32)
    return ids[..., :-1], ids[..., 1:]


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    """A tree's arrays by their paths, copied: the next step writes over them."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def _path(folder: Path, stage: int) -> Path:
    return folder / f"stage_{stage}.npz"


def _read_arrays(folder: Path, stage: int) -> dict[str, np.ndarray]:
    with np.load(_path(folder, stage)) as arrays:
        return dict(arrays)


class FolderStore:
    """A `KeyValueStore` of processes on one machine, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        path = self._file(key)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(value, encoding="utf-8")
        unfinished.rename(path)  # so that a reader finds all of it

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key.

        Raises:
            TimeoutError: If it is not set by then.
        """
        path, until_s = self._file(key), time.monotonic() + timeout_in_ms / 1e3
        while not path.exists():
            if time.monotonic() >= until_s:
                raise TimeoutError(f"{key} was not set within {timeout_in_ms / 1e3:g} s")
            time.sleep(_PAUSE_S)
        return path.read_text(encoding="utf-8")

    def _file(self, key: str) -> Path:
        return self._folder / f"{key.replace('/', '-')}.value"


def run_stage(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """Train one of the stages together with the other one.

    Args:
        rest: A folder that both processes share, "small" or "large", and the link's route.
    """
    folder, sizes = Path(rest[0]), SMALL if rest[1] == "small" else LARGE
    route: Route = "direct" if rest[2] == "direct" else "delegated"
    model = build_gpt2(sizes, "float32")
    settings = StageSettings(
        layers=cut_layers(sizes.num_layers, _NUM_STAGES),
        shapes=MicrobatchShapes.of_text(sizes.microbatch_size, sizes.sequence_length),
        seed=0,
        kinds=frozenset((OpKind.F, OpKind.B, OpKind.W)),
        optimizer=optax.sgd(_RATE),
        transfer_timeout_s=_TRANSFER_S,
        direct=frozenset((_LINK,) if route == "direct" else ()),
        delegated=frozenset(() if route == "direct" else (_LINK,)),
    )
    rank = arguments.rank
    with closing(_meet(arguments, folder, route)) as rendezvous:
        ends = channel_specs(settings.payloads(model), settings.delegated, rank)
        alone = None if route == "direct" else make_mesh(1)
        with open_data_plane(rendezvous, *ends) as plane:
            with jax.default_matmul_precision("highest"):
                trainer = StageTrainer(model, settings, rank, plane=plane, alone=alone)
            with closing(trainer):
                programs = _stage_programs(len(model.tied), route)
                trainer.add_slots(slots_needed(programs))
                rendezvous.exchange({})  # so that both have it
                figures, gradients = _train(trainer, programs[rank], rendezvous, sizes)
                delegated = trainer.delegated
                copies = (delegated.send_backend, delegated.receive_backend) if delegated else None
                np.savez(_path(folder, rank), allow_pickle=False, **gradients)
    link.send({"kind": "done", "rank": rank, **figures, "copies": copies})


def _meet(arguments: RankArguments, folder: Path, route: str) -> Rendezvous:
    """The other process, by JAX where the link between them is direct."""
    if route == "direct":
        return join_run(arguments, Joining(_MEET_S, _TRANSFER_S))
    store, secret = FolderStore(folder), inherited_secret(arguments.secret_fd or 0)
    return HostRendezvous(store, "127.0.0.1", arguments.rank, _NUM_STAGES, _MEET_S, secret)


def _stage_programs(num_tied: int, route: Route) -> tuple[RankInstructions, ...]:
    """Both stages' instructions for a step."""
    schedule = FIXED_SCHEDULES[_SCHEDULE](_NUM_STAGES, _MICROBATCHES)
    planned = simulate(schedule, StageCosts.uniform(_NUM_STAGES, 1.0, 1.0, 1.0))
    programs = lower(schedule, planned, {_LINK: route}, num_tied=num_tied)
    check(programs)
    return programs


def _train(
    trainer: StageTrainer, program: RankInstructions, rendezvous: Rendezvous, sizes: Sizes
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Figures of all steps, and the gradients of the first."""
    losses, norms, took_s, waited, gradients = [], [], [], [], {}
    runner = StepRunner(trainer, rendezvous)

    def keep_gradients(number: int) -> dict[str, Any]:
        if number == 0:
            (chunk,) = trainer.gradients
            gradients.update(_arrays(chunk))
        return {}

    for number in range(_STEPS):
        tokens, targets = _batch_of(sizes, number)
        inputs, began_s = StepInputs(tokens, targets, 1.0 / targets.size), time.monotonic()
        result = runner.run(program, inputs, number, began_s=began_s, report=keep_gradients)
        jax.block_until_ready(trainer.params)
        took_s.append(time.monotonic() - began_s)
        waited.append(1 - result.timings.busy_ms / 1e3 / took_s[-1])
        losses.append(result.totals.loss)
        norms.append(result.totals.grad_norm)
    figures = {
        "losses": losses,
        "norms": norms,
        "step_ms": 1e3 * median(took_s[_UNCOUNTED:]),
        "waiting": median(waited[_UNCOUNTED:]),
    }
    return figures, gradients


def train_plainly(sizes: Sizes) -> dict[str, Any]:
    """The same steps on JAX's first device, as plain JAX and Optax have it.

    Returns:
        `losses` and `norms` of every step, `step_ms`, and for each stage its part of the first
        step's `gradients`.
    """
    model = build_gpt2(sizes, "float32")
    layers = range(sizes.num_layers)
    params = _tied_copies(
        model, init_stage_params(model, jax.random.key(0), layers, is_first=True, is_last=True)
    )
    optimizer = optax.sgd(_RATE)
    state = jax.jit(optimizer.init)(params)
    with jax.default_matmul_precision("highest"):
        step = jax.jit(_plain_step(model, optimizer))
        step = step.lower(params, state, *_batch_of(sizes, 0)).compile()
    first, losses, norms, took_s = None, [], [], []
    for number in range(_STEPS):
        began_s = time.perf_counter()
        loss, gradients, norm, params, state = step(params, state, *_batch_of(sizes, number))
        jax.block_until_ready(params)
        took_s.append(time.perf_counter() - began_s)
        first = first or jax.tree.map(np.asarray, gradients)
        losses.append(float(loss))
        norms.append(float(norm))
    step_ms = 1e3 * median(took_s[_UNCOUNTED:])
    parts = [_arrays(part) for part in _by_stage(model, first or {})]
    return {"losses": losses, "norms": norms, "step_ms": step_ms, "gradients": parts}


def _tied_copies(model: PipelineModel, tree: Params) -> Params:
    """A whole model's tree in which the head has copies of what it shares with the embedding."""
    for embed, head in model.tied:
        tree = with_leaf(tree, ("head", *head), leaf_at(tree["embed"], embed))
    return tree


def _plain_step(
    model: PipelineModel, optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    def loss_sum(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params = _tied_copies(model, params)  # so one copy's gradient is that of both uses
        x = model.embed(params["embed"], tokens)
        x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
        return model.head(params["head"], x, targets)

    def step(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        def add(sums: Any, microbatch: Any) -> Any:
            found = jax.value_and_grad(loss_sum)(params, *microbatch)
            return jax.tree.map(jnp.add, sums, found), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add, zeros, (tokens, targets))
        loss, gradients = jax.tree.map(lambda leaf: leaf / targets.size, sums)
        updates, state = optimizer.update(gradients, state, params)
        norm = optax.global_norm(gradients)
        updated: Any = optax.apply_updates(params, updates)
        return loss, _tied_copies(model, gradients), norm, _tied_copies(model, updated), state

    return step


def _by_stage(model: PipelineModel, tree: Params) -> Iterator[Params]:
    """Each stage's part of a whole model's tree."""
    cut = cut_layers(model.num_layers, _NUM_STAGES)
    for own in cut:
        layers = jax.tree.map(lambda leaf, own=own: leaf[own.start : own.stop], tree["layers"])
        part = {"layers": layers}
        part |= {"embed": tree["embed"]} if own == cut[0] else {}
        part |= {"head": tree["head"]} if own == cut[-1] else {}
        yield part


if __name__ == "__main__":
    # Others have a part of the GPU's memory already, and the other process wants one too.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    run_rank(run_stage)
