"""A rank without JAX that fails as its command line says, for tests of the launcher."""

import os
import signal
import sys
import threading
from pathlib import Path

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.runtime.rank_process import run_rank


def talk(link, all_sent):
    for number in range(300):
        link.send({"kind": "word", "number": number})
    all_sent.touch()
    threading.Event().wait()


def behave(behaviour, link, rest):
    match behaviour:
        case "raise":
            raise ZeroDivisionError("the weights of stage 1 are upside down")
        case "mistake":
            raise UserError("configs/x.yaml: data.path: nothing there")
        case "stop":
            raise RunFailedError("nothing was finite")
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
        case "wait" | "deaf":
            threading.Event().wait()


def main(arguments, link, rest):
    behaviour, guilty = rest[0], int(rest[1])
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.send({"kind": "hello", "rank": arguments.rank, "pid": os.getpid()})
    if arguments.rank != guilty:
        if behaviour != "finish":
            threading.Event().wait()  # as a rank whose peer will never come
        return
    behave(behaviour, link, rest)


if __name__ == "__main__":
    run_rank(main)
