"""Processes that each hold one model and run inferences when asked; all end when the context is left."""

import json
import multiprocessing
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from compressor.checkpoint.serve import engine_environment
from compressor.errors import MachineLimit
from compressor.evaluation import alive, vllm_worker
from compressor.evaluation.load import Task
from compressor.evaluation.speed_worker import Engine, Sample, Workload, serve
from compressor.sources.model import Source


class Worker(Protocol):
    """``ask`` for an ``infer`` (answered with a Sample), the ``memory`` at the peak, or a ``leak`` check's counters."""

    engine: Engine

    def ask(self, request: str, argument: Any = None) -> Any: ...


class _TransformersWorker:
    def __init__(self, name: str, connection: Connection) -> None:
        self._name, self._connection = name, connection

    def start(self) -> None:
        """Wait until the model is loaded."""
        self.engine: Engine = self._receive()

    def ask(self, request: str, argument: Any = None) -> Any:
        with suppress(OSError):  # a process that is gone has left its reason to be received
            self._connection.send((request, argument))
        return self._receive()

    def _receive(self) -> Any:
        try:
            kind, answer = self._connection.recv()
        except (EOFError, OSError):
            raise MachineLimit(f"{self._name}: its process ended without a word: out of memory?") from None
        if kind == "refused":
            raise answer[0](answer[1])
        if kind == "failed":
            raise MachineLimit(f"{self._name}: cannot be run ({answer})")
        return answer


@contextmanager
def transformers_workers(
    sources: dict[str, Source], task: Task, device: str, dtype: str, workload: Workload
) -> Iterator[dict[str, Worker]]:
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        workers: dict[str, _TransformersWorker] = {}
        for name, source in sources.items():
            ours, theirs = context.Pipe()
            arguments = (
                theirs, source.path, task, device, dtype, source.trust_remote_code, torch.get_num_threads(), workload,
            )  # fmt: skip
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
            workers[name] = _TransformersWorker(source.ref, ours)
        for worker in workers.values():
            worker.start()
        yield {**workers}
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


class _VllmWorker:
    def __init__(self, name: str, process: "subprocess.Popen[str]", log: Path) -> None:
        self._name, self._process, self._log = name, process, log

    def start(self) -> None:
        """Wait until the model is loaded."""
        found = self._receive()
        self.engine = Engine(found["name"], found["dtype"], found["threads"])

    def ask(self, request: str, argument: Any = None) -> Any:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps([request, argument]) + "\n")
            self._process.stdin.flush()
        answer = self._receive()
        return Sample(answer["prefill"], answer["steps"]) if request == "infer" else answer

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = (self._log.read_text("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
            raise MachineLimit(f"{self._name}: vllm ended without an answer ({last[:200]})")
        kind, answer = json.loads(line)
        if kind == "failed":
            raise MachineLimit(f"{self._name}: vllm cannot run it here ({answer})")
        return answer


@contextmanager
def vllm_workers(sources: dict[str, Source], python: Path, workload: Workload) -> Iterator[dict[str, Worker]]:
    """Engines are loaded one after another: each measures what memory is free when it starts."""
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="compressor-") as directory:
        # Copied, because Python puts a script's directory first on its path.
        for module in (vllm_worker, alive):
            shutil.copy(str(module.__file__), directory)
        try:
            workers: dict[str, _VllmWorker] = {}
            for name, source in sources.items():
                request = {
                    "model": str(source.path),
                    "trust_remote_code": source.trust_remote_code,
                    "models": len(sources),
                    **vars(workload),
                }
                log = Path(directory) / f"{name}.log"
                with log.open("wb") as errors:
                    process = subprocess.Popen(
                        [str(python.absolute()), "vllm_worker.py", json.dumps(request)],
                        cwd=directory,
                        env=engine_environment(),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                processes.append(process)
                workers[name] = _VllmWorker(source.ref, process, log)
                workers[name].start()
            yield {**workers}
        finally:
            for process in processes:
                with suppress(OSError):
                    process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:  # an engine's shutdown may hang
                    process.kill()
                    process.wait()
