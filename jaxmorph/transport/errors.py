"""What can go wrong with the data plane, as its user sees it."""


class TransportError(RuntimeError):
    """The data plane can't do its work: its sidecar won't run, or its parts disagree."""


class PeerGoneError(TransportError):
    """The process at the other end of a channel is gone: its messages will never come."""
