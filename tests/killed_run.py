"""Run a command and be killed at chosen moments: ``python killed_run.py N,N,…,0 COMPRESSOR-ARGUMENTS``

One process after another is forked from this one, which has everything imported; each goes on where the one before it
was killed, until one ends by itself: the last one, with 0, is left alone. A whole number N kills at the N-th file that is put in place; one
with a decimal point after so many seconds. Prints how each of them ended, and how long the last one took.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

import torch


def main() -> None:
    moments, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    import compressor.distillation.run
    import compressor.pipelines.run  # noqa: F401  # all that the children need
    from compressor.cli.main import main as command

    for moment in moments.split(","):
        child = os.fork()
        if child == 0:
            if "." in moment:
                threading.Timer(float(moment), os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                die_at(int(moment))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output is for how they ended
            sys.argv = ["compressor", *arguments]
            try:
                command()
            except SystemExit as stop:
                os._exit(int(stop.code or 0))
        start = time.monotonic()
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"ended {os.WEXITSTATUS(status)}", flush=True)
        if not os.WIFSIGNALED(status):
            break
    print(f"{time.monotonic() - start:.3f} s")


def die_at(moment: int) -> None:
    """Kill this process before (odd) or after (even) the renames that put files and directories in place."""
    count = 0

    def counted(rename: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if moment and count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            result = rename(*arguments, **options)
            count += 1
            if moment and count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.replace = counted(os.replace)
    os.rename = counted(os.rename)


if __name__ == "__main__":
    main()
