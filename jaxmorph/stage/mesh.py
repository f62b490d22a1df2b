"""The device mesh of a run, and the submeshes of a stage and of a replaced link."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmorph.errors import UserError

STAGE, TENSOR = "stage", "tensor"
"""The axes of a replica's mesh: pipeline stages, and the devices of a stage."""

DATA = "data"
"""The axis of replicas, in the mesh of one stage in all of them."""

AXES = (STAGE, TENSOR)


def make_mesh(stages: int, tensor: int = 1, replicas: int = 1, replica: int = 0) -> Mesh:
    """Returns a replica's mesh (stage, tensor), over the first devices of its processes, in order.

    Raises:
      UserError: there are fewer devices than the run needs.
    """
    return Mesh(_grid(stages, tensor, replicas)[replica], AXES)


def make_data_mesh(stages: int, tensor: int, replicas: int, stage: int) -> Mesh:
    """Returns the mesh (data, tensor) of one stage in all replicas; see `make_mesh`."""
    return Mesh(_grid(stages, tensor, replicas)[:, stage], (DATA, TENSOR))


def _grid(stages: int, tensor: int, replicas: int) -> np.ndarray:
    """All devices of a run, [replica, stage, tensor]."""
    devices = _devices(tensor)
    needed = replicas * stages * tensor
    if len(devices) < needed:
        of_data = f" x {replicas} data" if replicas > 1 else ""
        raise UserError(
            f"parallelism: {stages} stages x {tensor} tensor{of_data} need {needed} devices, got "
            f"{len(devices)}"
        )
    return np.array(devices[:needed]).reshape(replicas, stages, tensor)


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
    """Returns the (1, tensor) mesh of one stage."""
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
