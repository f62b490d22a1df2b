"""The device mesh of a run, and the submeshes of a stage and of a replaced link."""

from collections.abc import Sequence
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


def make_mesh(stages: int, tensor: int = 1, ranks: Sequence[int] = ()) -> Mesh:
    """Returns a pipeline's mesh (stage, tensor) over the first devices of its processes.

    Args:
      ranks: the process of each stage; none: the first ones, in order.

    Raises:
      UserError: there are fewer devices than the mesh needs.
    """
    return Mesh(_devices_of(ranks or range(stages), tensor), AXES)


def make_data_mesh(ranks: Sequence[int], tensor: int = 1) -> Mesh:
    """Returns the mesh (data, tensor) of one stage in all replicas, whose processes these are."""
    return Mesh(_devices_of(ranks, tensor), (DATA, TENSOR))


def _devices_of(ranks: Sequence[int], tensor: int) -> np.ndarray:
    """The first devices of processes, [rank, tensor]; a lone process's devices in order."""
    devices = _devices(tensor)
    if len(devices) < (max(ranks) + 1) * tensor:
        raise UserError(
            f"parallelism.tensor: got {tensor} for each of {len(ranks)} stages, and "
            f"{len(devices)} devices here, expected at least {len(ranks) * tensor}"
        )
    return np.array([devices[rank * tensor : (rank + 1) * tensor] for rank in ranks])


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
