"""The device mesh of a run, and the submeshes of a stage and of a replaced link."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmorph.errors import UserError

STAGE, DATA, TENSOR = "stage", "data", "tensor"
"""The mesh's axes: pipeline stages, shards of a microbatch, shards of a weight."""

AXES = (STAGE, DATA, TENSOR)


def make_mesh(stages: int, data: int = 1, tensor: int = 1) -> Mesh:
    """Returns the mesh (stage, data, tensor) over the first devices of all processes, in order.

    Raises:
      UserError: there are fewer devices than the mesh needs.
    """
    devices = _devices(data * tensor)
    needed = stages * data * tensor
    if len(devices) < needed:
        raise UserError(
            f"parallelism: {stages} stages x {data} data x {tensor} tensor need {needed} devices, "
            f"got {len(devices)}"
        )
    return Mesh(np.array(devices[:needed]).reshape(stages, data, tensor), AXES)


def _devices(per_stage: int) -> list[Any]:
    """All devices of a lone process; with several processes, `per_stage` devices of each."""
    devices = jax.devices()
    if jax.process_count() == 1:
        return devices
    of_process: dict[int, list[Any]] = {}
    for device in devices:
        of_process.setdefault(device.process_index, []).append(device)
    return [device for rank in sorted(of_process) for device in of_process[rank][:per_stage]]


def stage_submesh(mesh: Mesh, stage: int) -> Mesh:
    """Returns the (1, data, tensor) mesh of one stage."""
    return Mesh(mesh.devices[stage : stage + 1], AXES)


def spare_mesh(mesh: Mesh) -> Mesh | None:
    """Returns a mesh of the same shape over unused devices of the same processes, or None.

    A direct link whose transfer failed cannot use the same tuple of devices again: XLA closes its
    communicator for good.
    """
    spares: dict[int, list[Any]] = {}
    for device in jax.devices():
        if device not in mesh.devices.flat:
            spares.setdefault(device.process_index, []).append(device)
    try:
        taken = [spares[device.process_index].pop(0) for device in mesh.devices.flat]
    except (KeyError, IndexError):
        return None
    return Mesh(np.array(taken).reshape(mesh.devices.shape), AXES)
