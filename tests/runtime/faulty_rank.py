"""A rank without JAX that fails as its command line says, for tests of the launcher."""

import base64
import hashlib
import os
import signal
import sys
import threading
from pathlib import Path

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.runtime.causes import WaitedInVainError
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.transport.secret import inherited_secret

ERRORS = {
    "raise": ZeroDivisionError("the weights of stage 1 are upside down"),
    "mistake": UserError("configs/x.yaml: data.path: nothing there"),
    "stop": RunFailedError("nothing was finite"),
    "be lost": ConnectionError("connection closed by peer"),
}


def talk(link, all_sent):
    for number in range(300):
        link.send({"kind": "word", "number": number})
    all_sent.touch()
    threading.Event().wait()


def look_for_secret(link, arguments):
    """Reads the run's secret, and looks for it where anyone might."""
    secret = inherited_secret(arguments.secret_fd)
    seen = [
        Path(f"/proc/{pid}/{file}").read_bytes()
        for pid in (os.getpid(), os.getppid())
        for file in ("cmdline", "environ")
    ]
    forms = (secret, secret.hex().encode(), base64.b64encode(secret))
    found = any(form in each for form in forms for each in seen)
    digest = hashlib.sha256(secret).hexdigest()
    link.send({"kind": "secret", "found": found, "bytes": len(secret), "digest": digest})


def fork(link):
    """Start a process that holds this one's descriptors, and outlives it."""
    child = os.fork()
    if not child:
        threading.Event().wait()
    link.send({"kind": "child", "pid": child})


def behave(behaviour, link, rest):
    if behaviour.startswith("fork and "):
        fork(link)
    match behaviour.removeprefix("fork and "):
        case "raise" | "mistake" | "stop" | "be lost":
            raise ERRORS[behaviour]
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            print("last words", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        case "talk":
            talk(link, Path(rest[2]))
        case "wait until asked":
            link.stop_asked.wait()
            link.send({"kind": "word", "asked": True})
        case "fail when asked":
            link.stop_asked.wait()
            raise ZeroDivisionError("asked at a bad moment")
        case "wait" | "deaf" | "silent":
            threading.Event().wait()


def main(arguments, link, rest):
    behaviour, guilty = rest[0], int(rest[1])
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "show secret":
        look_for_secret(link, arguments)
        return
    link.send({"kind": "hello", "rank": arguments.rank, "pid": os.getpid()})
    if arguments.rank != guilty:
        if behaviour == "silent" and arguments.rank == 0:
            raise WaitedInVainError("5 s in vain", guilty)
        if behaviour not in ("finish", "fork and finish"):
            threading.Event().wait()  # as a rank whose peer will never come
        return
    behave(behaviour, link, rest)


if __name__ == "__main__":
    run_rank(main)
