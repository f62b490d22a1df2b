"""All that the kernels consist of is assembled for a Hopper GPU, where there is an assembler."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from jaxmorph.pallas_kernels import FROM_HOST, TO_HOST, CopyTuning
from jaxmorph.pallas_kernels.copy_from_host import assembly as from_host_assembly
from jaxmorph.pallas_kernels.copy_to_host import assembly as to_host_assembly
from jaxmorph.pallas_kernels.tiling import tile

pytestmark = pytest.mark.one_jax

SIZES = [1, 16, 17, 8 << 10, (8 << 10) + 16, (8 << 10) + 31, (64 << 20) + 2048 + 5]
TUNINGS = [TO_HOST, FROM_HOST, CopyTuning(1), CopyTuning(32, 128, 32), CopyTuning(64, 1024, 4)]
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"


def _assembler(folder: Path) -> Path | None:
    """Found on the path, or made executable from the wheel `nvidia-cuda-nvcc`."""
    if found := shutil.which("ptxas"):
        return Path(found)
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "ptxas":
            copy = Path(shutil.copy(file.locate(), folder))
            copy.chmod(0o700)
            return copy
    return None


@pytest.fixture(scope="module")
def assemble(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptxas")
    assembler = _assembler(folder)
    if assembler is None:
        pytest.skip("no ptxas on the path, and no wheel nvidia-cuda-nvcc: `make ptxas`")

    def run(source):
        (folder / "kernels.ptx").write_text(source)
        command = [assembler, "-v", "-arch=sm_90a", "kernels.ptx", "-o", "kernels.cubin"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    return run


def _entry(name, assembly, threads):
    """A kernel with the block for its body, and its operands for parameters."""
    body = assembly
    for index in range(4):
        body = body.replace(f"${index}", f"%operand{index}")
    parameters = ", ".join(f".param .u64 {name}_{index}" for index in range(4))
    loads = [f"ld.param.u64 %operand{index}, [{name}_{index}];" for index in range(4)]
    head = f".visible .entry {name}({parameters})\n.maxntid {threads}, 1, 1\n"
    return head + "\n".join(["{", ".reg .b64 %operand<4>;", *loads, body, "ret;", "}", ""])


def test_both_kernels_assemble_for_every_size_and_tuning_and_spill_no_register(assemble):
    entries = [
        _entry(f"kernel_{which}_{size}_{at}", assembly(tile(size, tuning)), tuning.threads)
        for which, assembly in enumerate((to_host_assembly, from_host_assembly))
        for size in SIZES
        for at, tuning in enumerate(TUNINGS)
    ]
    # ptxas 13.0 crashes on a register that is called like a function.
    entries.append(_entry("thread", to_host_assembly(tile(16, TO_HOST)), TO_HOST.threads))
    done = assemble(HEAD + "".join(entries))
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("0 bytes spill stores, 0 bytes spill loads") == len(entries)


def test_the_assembler_does_object_to_what_is_wrong(assemble):
    text = to_host_assembly(tile(16, TO_HOST)).replace("st.release.sys", "st.release")
    assert assemble(HEAD + _entry("kernel", text, 128)).returncode != 0
