# pyright: reportMissingImports=false
"""SpectraX, whose stages are devices of one process.

It takes part where it is installed: `pip install --no-deps spectrax-lib treescope`. The function to
differentiate is that of the plain loop, cut by SpectraX's markers. SpectraX's gradients stay on the
stages' devices, and so does AdamW, one jitted update a stage; only the squared norms meet.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from benchmarks.training_speed.worker import WorkerOptions, serve

Tree = Any


class SpectraXLoop:
    """The loop."""

    def __init__(self, options: WorkerOptions) -> None:
        import jax  # once this process is confined

        jax.config.update("jax_num_cpu_devices", options.num_stages)
        import jax.numpy as jnp
        import optax
        import spectrax
        from spectrax.runtime import mpmd, schedules

        from benchmarks.training_speed.plain_jax import adamw, gpt2_config, initial_params
        from jaxmorph.models.gpt2.model import GPT2
        from jaxmorph.runtime.optimizer import is_matrix

        workload, num_stages = options.workload, options.num_stages
        model = GPT2(gpt2_config(workload))
        schedule = getattr(schedules, options.variant)(microbatches=workload.microbatches)
        mesh = spectrax.create_mesh(axis_dims=(num_stages, 1, 1, 1, 1, 1), mpmd_axis="pp")

        # A microbatch's share of the loss is its mean, and SpectraX takes the mean over them.
        @mpmd.sxjit(mesh=mesh, schedule=schedule, batch_argnums=(1, 2))
        def mean_loss(stages: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
            x = model.embed(stages[0]["embed"], tokens)
            for stage in stages:
                x, _ = jax.lax.scan(lambda x, own: (model.layer(own, x), None), x, stage["layers"])
                if stage is not stages[-1]:
                    x = mpmd.sxstage_iter(x)
            return model.head(stages[-1]["head"], x, targets) / targets.size

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Tree, state: Tree, gradients: Tree, scale: float) -> tuple[Tree, Tree]:
            scaled = jax.tree.map(lambda leaf: leaf * scale, gradients)
            updates, state = optimizer.update(scaled, state, params)
            return optax.apply_updates(params, updates), state

        optimizer = adamw(workload, lambda stage: is_matrix([stage])[0])
        self._clip_norm = workload.clip_norm
        self._gradients, self._update = mpmd.sxvalue_and_grad(mean_loss), update
        self._squared_norm = jax.jit(
            lambda tree: sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))
        )
        cut = _cut(initial_params(workload), num_stages)
        devices = jax.devices()
        self._stages = [jax.device_put(own, at) for own, at in zip(cut, devices, strict=True)]
        self._states = [jax.jit(optimizer.init)(own) for own in self._stages]
        shape = workload.microbatches, workload.microbatch_size, workload.sequence_length
        self._compile(np.zeros(shape, np.int32))

    def _compile(self, tokens: np.ndarray) -> None:
        """Compile everything; a step of copies changes no parameter."""
        import jax

        kept = jax.tree.map(np.asarray, (self._stages, self._states))
        self.step(tokens, tokens)
        homes = jax.tree.map(lambda leaf: leaf.sharding, (self._stages, self._states))
        self._stages, self._states = jax.device_put(kept, homes)

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
        """Train on a batch; the loss."""
        whole = -1, tokens.shape[-1]
        batch = tokens.reshape(whole), targets.reshape(whole)
        loss, (gradients,) = self._gradients(self._stages, *batch)
        norm = math.sqrt(sum(map(float, [self._squared_norm(own) for own in gradients])))
        scale = min(1.0, self._clip_norm / norm)
        parts = zip(self._stages, self._states, gradients, strict=True)
        updated = [self._update(*part, scale) for part in parts]
        self._stages, self._states = map(list, zip(*updated, strict=True))
        return loss

    def finish(self, losses: list[Any]) -> list[float]:
        """Wait for the parameters; the losses."""
        import jax

        jax.block_until_ready(self._stages)
        return [float(loss) for loss in losses]

    def close(self) -> None:
        """Nothing was started."""


def _cut(params: dict[str, Tree], num_stages: int) -> list[dict[str, Tree]]:
    """Each stage's parameters: its layers, with the embedding or the head at the ends."""
    import jax

    stages: list[dict[str, Tree]] = [
        {
            "layers": jax.tree.map(
                lambda leaf, at=at: np.split(leaf, num_stages)[at], params["layers"]
            )
        }
        for at in range(num_stages)
    ]
    stages[0]["embed"], stages[-1]["head"] = params["embed"], params["head"]
    return stages


if __name__ == "__main__":
    serve(SpectraXLoop)
