"""The faults that a run can survive, by the keys that its configuration has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmorph.config import check_config
from jaxmorph.errors import UserError

_RESTARTS = {"max_restarts": 1000, "backoff_s": 0.1, "from_start": True}
_NO_RESTARTS = {"max_restarts": 0}  # a rank that dies without having been killed is a mistake
_DEAD_CARD = {"between": [0, 1], "cut": True, "route": "direct"}
_DIRECT_S = 1.0


@dataclass(frozen=True)
class Features:
    """The faults that runs of a version survive.

    Attributes:
        restarts: They restart when a rank has died. Then no link is cut, because emulated cuts hold
            only until the first restart.
        direct_cuts: A link's direct route can be cut alone, and its messages are delegated.
    """

    restarts: bool
    direct_cuts: bool

    def of_run(self, number: int) -> "Features":
        """Those of one of several runs: ranks die in every other one, cards in the others."""
        dies = number % 2 == 0 and self.restarts
        return Features(restarts=dies, direct_cuts=self.direct_cuts and not dies)

    def overrides(self) -> tuple[str, ...]:
        """The configuration's overrides for these."""
        found = []
        policy = _RESTARTS if self.restarts else _NO_RESTARTS
        found.append(f"restart_policy={policy}".replace("True", "true"))
        if self.direct_cuts:
            found.append(f"timeouts.direct_s={_DIRECT_S}")
        return tuple(found)


def known_features() -> Features:
    """Those of the imported version, by the keys that its configuration accepts."""
    cut = {"parallelism": {"stages": 2}, "emulation": {"links": [_DEAD_CARD]}}
    return Features(
        restarts=_accepts({"restart_policy": _RESTARTS}),
        direct_cuts=_accepts({**cut, "timeouts": {"direct_s": _DIRECT_S}}),
    )


def _accepts(tree: Mapping[str, Any]) -> bool:
    try:
        check_config(tree)
    except UserError:
        return False
    return True
