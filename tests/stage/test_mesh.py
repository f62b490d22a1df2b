import os
import subprocess
import sys

import pytest

from jaxmorph.errors import UserError
from jaxmorph.stage.mesh import AXES, make_mesh, stage_submesh

MESHES = """
from jaxmorph.stage.mesh import make_mesh, spare_mesh, stage_submesh
ids = lambda mesh: [device.id for device in mesh.devices.flat]
mesh = make_mesh(4, tensor=2)
print(dict(mesh.shape), ids(stage_submesh(mesh, 2)), dict(stage_submesh(mesh, 2).shape))
half = make_mesh(2, tensor=2)
print(spare_mesh(mesh), dict(spare_mesh(half).shape), ids(spare_mesh(half)))
"""


def test_a_stage_and_its_spare_have_their_own_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", MESHES],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == [
        "{'stage': 4, 'tensor': 2} [4, 5] {'stage': 1, 'tensor': 2}",
        "None {'stage': 2, 'tensor': 2} [4, 5, 6, 7]",
    ]


def test_one_stage_is_the_whole_mesh():
    mesh = make_mesh(1)
    assert mesh.axis_names == AXES
    assert stage_submesh(mesh, 0).devices.tolist() == mesh.devices.tolist()


def test_too_few_devices_are_a_user_error():
    with pytest.raises(UserError, match=r"got 7 for each of 5 stages, .* expected at least 35"):
        make_mesh(5, 7)
