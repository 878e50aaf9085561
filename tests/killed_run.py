"""Run a recipe and be killed at the N-th file that is put in place: ``python killed_run.py RECIPE OUTPUT N...``

One process after another is forked from this one, which has everything imported; each goes on in the same run
directory, and the last one, with N = 0, is left alone. Prints how each of them ended.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    recipe, output, *moments = sys.argv[1:]
    torch.set_num_threads(1)
    from compressor.pipelines.run import run_recipe
    from compressor.recipes import build_recipe

    for moment in map(int, moments):
        child = os.fork()
        if child == 0:
            die_at(moment)
            run_recipe(build_recipe(Path(recipe), {"output": output}), command="run")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"ended {os.WEXITSTATUS(status)}", flush=True)


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
