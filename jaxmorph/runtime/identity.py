"""Which message a transfer is, among all of a run."""

from typing import NamedTuple

from jaxmorph.program.instructions import Payload, Transfer

_WORD = 0xFFFFFFFF
_PAYLOAD_CODES = {payload: code for code, payload in enumerate(Payload)}


class TransferIdentity(NamedTuple):
    """Which message this is, among all of a run: what the ends of a transfer check."""

    epoch: int
    step: int
    transfer: Transfer

    def words(self) -> tuple[int, ...]:
        """Six numbers below 2**32 that name the message on the wire; epoch and step come first."""
        payload, source, destination, microbatch, chunk = self.transfer
        code = _PAYLOAD_CODES[payload] + len(_PAYLOAD_CODES) * chunk
        return (self.epoch, self.step & _WORD, code, source, destination, microbatch)

    def __str__(self) -> str:
        return f"{self.transfer} of step {self.step}, epoch {self.epoch}"
