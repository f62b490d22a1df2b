"""Settings that XLA and NCCL read once: they must be set before JAX computes anything.

On GPUs some of them decide whether a failed or stalled collective ends at all (`gpu_settings`).
None of this has been seen on a GPU yet.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import jax

from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.transport.host import num_processors

_DEVICES_FLAG = "xla_force_host_platform_device_count"
_KNOWN_SINCE, _UNKNOWN_SINCE = (0, 10), (0, 13)
"""The JAX versions between which all flags below are known: `make test-jax` asks each."""
_ASK_S = 60.0
_ASK = "from jaxlib import xla_client; xla_client.CompileOptions()"  # which parses XLA_FLAGS


@dataclass(frozen=True)
class GpuSetting:
    """A flag of XLA or an environment variable that ranks on GPUs have unless the user chose.

    Attributes:
        name: A flag's begins with "xla_".
        why: What it changes, in words.
    """

    name: str
    value: str
    why: str

    @property
    def is_flag(self) -> bool:
        """Whether it belongs into `XLA_FLAGS`."""
        return self.name.startswith("xla_")

    @property
    def as_flag(self) -> str:
        """As it stands in `XLA_FLAGS`."""
        return f"--{self.name}={self.value}"


_ALWAYS = (
    # By default the processes of a program share the timing of kernels and wait in the compiler,
    # without a limit, for each other's choices. Ranks compile different programs in different
    # orders, so they could wait for ever.
    GpuSetting(
        "xla_gpu_shard_autotuning", "false", "ranks don't wait for each other in the compiler"
    ),
    GpuSetting("NCCL_DEBUG", "WARN", "NCCL writes its reasons to the ranks' logs"),
)
_ENDS_RANKS = (
    GpuSetting(
        "xla_gpu_nccl_terminate_on_error", "true", "an error of NCCL ends the rank within 30 s"
    ),
)
# As on JAX's page on fault tolerance, except its other GPU client: that client has a single
# stream, on which copies of delegated messages would delay computation (openxla/xla#28859).
_RAISES_ERRORS = (
    GpuSetting(
        "xla_gpu_nccl_terminate_on_error", "false", "an error of NCCL fails its link, not the rank"
    ),
    GpuSetting("xla_gpu_nccl_blocking_communicators", "false", "NCCL's calls can be aborted"),
    GpuSetting(
        "xla_gpu_nccl_async_execution", "true", "NCCL's calls don't hold the dispatching thread"
    ),
    GpuSetting(
        "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "1",
        "collectives with a process that is gone are aborted",
    ),
)  # fmt: skip


def gpu_settings(*, fails_over: bool) -> tuple[GpuSetting, ...]:
    """What ranks on GPUs have unless the user chose something else.

    Even with these NCCL raises no error for a silent peer: the rank's watchdog ends the rank.

    Args:
        fails_over: Whether links become delegated when their direct paths fail. Otherwise a rank
            whose collective failed can only end.
    """
    return (*_ALWAYS, *(_RAISES_ERRORS if fails_over else _ENDS_RANKS))


def set_up_gpus(*, fails_over: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what ranks on GPUs need; what the user has set is kept. On CPUs it changes nothing."""
    settings = gpu_settings(fails_over=fails_over)
    flags = [each.as_flag for each in settings if each.is_flag]
    if not _KNOWN_SINCE <= _version() < _UNKNOWN_SINCE:  # an unknown flag would end the process
        unknown = unknown_flags(flags)
        flags = [flag for flag in flags if flag not in unknown]
    # The last of two flags counts, so the user's come after.
    environment["XLA_FLAGS"] = " ".join([*flags, environment.get("XLA_FLAGS", "")]).strip()
    for each in settings:
        if not each.is_flag:
            environment.setdefault(each.name, each.value)


def settings_in_force(*, fails_over: bool) -> Iterator[str]:
    """The settings that this process has, as `name=value`."""
    for each in gpu_settings(fails_over=fails_over):
        if (value := value_in_force(each)) is not None:
            yield f"{each.name}={value}"


def value_in_force(setting: GpuSetting) -> str | None:
    """This process's value of a setting; None: it has none."""
    if not setting.is_flag:
        return os.environ.get(setting.name)
    pattern = rf"(?:^|\s)--{setting.name}(?:=(\S*))?(?=\s|$)"
    found = re.findall(pattern, os.environ.get("XLA_FLAGS", ""))
    return (found[-1] or "true") if found else None


def unknown_flags(flags: Sequence[str]) -> frozenset[str]:
    """The flags that the installed JAX doesn't know, found by a separate process.

    It takes half a second. If that process doesn't answer, all flags count as unknown.
    """
    asked = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK], env=asked, capture_output=True, text=True, timeout=_ASK_S
        )
    except (OSError, subprocess.SubprocessError):
        return frozenset(flags)
    named = frozenset(flag for flag in flags if flag in answer.stderr)
    return named if answer.returncode == 0 or named else frozenset(flags)


def _version() -> tuple[int, ...]:
    return tuple(map(int, jax.__version__.split(".")[:2]))


def have_threads(arguments: RankArguments, least: int) -> None:
    """Give XLA's pools at least so many threads, if the launcher gave them fewer.

    A number that the user or the script has set is kept.
    """
    given = arguments.num_threads
    if given is not None and given < least and os.environ.get("NPROC") == str(given):
        os.environ["NPROC"] = str(least)


def limit_collectives(timeout_s: float) -> None:
    """Give CPU collectives a deadline; without one an unmatched transfer waits for ever."""
    flag = f"--xla_cpu_collective_timeout_seconds={max(1, round(timeout_s))}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def have_cpu_devices(num_devices: int, *, spare: bool) -> None:
    """Make JAX show the CPU devices of a stage; a number that the user has set is kept.

    Args:
        spare: Whether to have twice as many, so that failed links can be restored over the others:
            only `LinkCommunicators` uses them.
    """
    # XLA gives its thread pools at least one thread per device. Where they would have only one, a
    # second thread would change the speed and the last bits of results.
    given = os.environ.get("NPROC", "")
    threads = int(given) if given.isdecimal() else num_processors()
    if spare and threads >= 2:
        num_devices *= 2
    counted = jax.config.values["jax_num_cpu_devices"] >= 0
    if num_devices == 1 or counted or _DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    with suppress(RuntimeError):  # JAX has computed something already
        jax.config.update("jax_num_cpu_devices", num_devices)
