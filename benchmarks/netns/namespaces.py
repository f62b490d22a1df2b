"""A host of its own on this machine: network, host name and hosts file, without names to clash.

Namespaces here have no names: each lasts as long as a process that holds it, and that process ends
when its standard input does. So two benches never meet, and nothing is left, however one ends.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
_KINDS = ("--net", "--uts", "--mount")

# Gloo, for one, looks up its own host's name; the file that answers is kept by the mount alone.
# A new /sys shows this network's cards.
_HOLD = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t sysfs sysfs /sys
ip link set lo up
echo ready
exec cat
"""

_TRIAL = """
set -e
mount -t sysfs sysfs /sys
ip link add trial type bridge
ip link add card type veth peer name port
tc qdisc add dev card root tbf rate 1mbit burst 32kb latency 50ms
"""


def why_unavailable() -> str | None:
    """Why no namespaces can be laid here, in one line; None where they can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (packages iproute2, util-linux)"
    # All that is done later is tried: containers forbid some of it, kernels are built without some.
    tried = subprocess.run(["unshare", *_KINDS, "sh", "-c", _TRIAL], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces can't be laid here: {' '.join(tried.stderr.split())}"
    return None


class Namespace:
    """One host's namespaces, until they are closed.

    Args:
        hosts: Each name that they can look up, with its address.
    """

    def __init__(self, name: str, hosts: Sequence[tuple[str, str]] = ()) -> None:
        self.name = name
        with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{address} {host}\n" for host, address in hosts)
            file.flush()
            Path(file.name).chmod(0o644)
            self._holder = subprocess.Popen(
                ["unshare", *_KINDS, "sh", "-c", _HOLD, "hold", name, file.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != b"ready\n":
                self.close()
                raise RuntimeError(f"host {name}: its namespaces could not be laid")
        self.pid = self._holder.pid

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command in here, as a process that ends with the one that starts it."""
        inside = ["nsenter", f"--target={self.pid}", *_KINDS, "--wd=."]
        return [*inside, "setpriv", "--pdeathsig=KILL", "--", *command]

    def run(self, command: str) -> str:
        """What a short command prints that is run in here.

        Raises:
            RuntimeError: If it fails, with what it said.
        """
        inside = ["nsenter", f"--target={self.pid}", *_KINDS, "--", *command.split()]
        done = subprocess.run(inside, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {command}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End the process that holds the namespaces; they go with the last process in them."""
        self._holder.kill()
        self._holder.communicate()
