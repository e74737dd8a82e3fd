"""Runs executed by Ray: one task of Ray a run, which starts the same command as everywhere and brings its exit code.

Ray chooses the machine and starts a run again whose worker was lost; it goes on from its last checkpoint. A run is told
to stop through Ray's own cancellation. Needs the extra `ray`, which is imported when the engine is opened.

Not for: what happens on the worker (`worker`), the order of tasks (`engine`).
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from equipoise.engine import UNBOUNDED, Engine, Task, command_line
from equipoise.engines.options import RayOptions
from equipoise.engines.worker import NO_GPU, STOPPED, carried, note_failure
from equipoise.errors import ConfigError, ResourceError
from equipoise.forks import Child
from equipoise.text import one_line

STORE_BYTES: Final = 100_000_000
"""Object store of a Ray of this machine; only exit codes pass through it, and Ray wants at least 75 MB."""
ANSWER_S: Final = 10.0
"""Seconds in which somebody has to answer at the address of a cluster."""


@contextmanager
def ray_engine(
    options: RayOptions,
    *,
    num_jobs: int | None,
    cpus: int,
    gpus: float,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[Engine]:
    """Ray, connected to or started for a `with` block; at most `num_jobs` runs at a time, None = as Ray has room.

    ConfigError when the cluster cannot be reached, or no machine of it could ever take a run.
    """
    import ray

    with _connected(ray, options):
        cpus = options.cpus or cpus
        _check_room(ray, cpus, gpus, options)
        remote = ray.remote(_remote_function())
        wants = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "memory": int(options.memory_gb * 2**30) if options.memory_gb else None,
            "max_retries": options.retries,
        }
        carries = {**carried(environment), **({} if gpus else NO_GPU)}

        def start(tasks: Sequence[Task]) -> list[Child]:
            children: list[Child] = []
            for task in tasks:
                call = remote.options(name=task.run.folder, **wants).remote
                ref = call(command_line(task, arguments), str(task.log.resolve()), carries)
                children.append(_RayChild(ray=ray, ref=ref, log=task.log))
            return children

        yield Engine(
            start=start,
            num_jobs=num_jobs or UNBOUNDED,
            how=f"by Ray at {ray.get_runtime_context().gcs_address}, {cpus} core(s)"
            + (f" and {gpus:g} GPU(s)" if gpus else "")
            + " a run"
            + (f", {num_jobs} at a time" if num_jobs else ""),
            retries=options.retries,
        )


def _remote_function() -> Any:
    """What Ray carries to a worker: a function of a function goes there by value, so PYTHONPATH can be set first."""

    def work(line: list[str], log: str, environment: dict[str, str]) -> int:
        import os
        import sys
        from pathlib import Path

        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        from equipoise.engines.worker import attempt

        with attempt(line, Path(log), environment) as running:
            while True:
                try:
                    return running.wait()
                except KeyboardInterrupt:  # how Ray cancels
                    running.stop()

    return work


@contextmanager
def _connected(ray: Any, options: RayOptions) -> Iterator[None]:
    _check_answers(options.address)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    here = {"include_dashboard": False, "object_store_memory": STORE_BYTES} if options.address == "local" else {}
    try:
        ray.init(address=options.address, log_to_driver=False, logging_level="critical", **here)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"--engine-option address={options.address}: {one_line(str(error))[:300]}; expected local, auto or the "
            "address of a running cluster"
        ) from None
    finally:
        for number, handler in before.items():  # Ray puts one of its own in place of what counts signals here
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """ConfigError when nobody answers at HOST:PORT or ray://HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    expected = "expected local, auto or the address of a running cluster"
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536 and host):
        raise ConfigError(f"--engine-option address={address}: not HOST:PORT or ray://HOST:PORT; {expected}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(f"--engine-option address={address}: {error.strerror or error}; {expected}") from None


def _check_room(ray: Any, cpus: int, gpus: float, options: RayOptions) -> None:
    """Raises ResourceError when Ray would wait for ever: no machine has what a run is to have.

    A cluster with no machine yet that could take anything may still grow, and is waited for.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wants = {"cpus": ("CPU", cpus), "gpus": ("GPU", gpus), "memory_gb": ("memory", (options.memory_gb or 0) * 2**30)}
    if not any(node.get("CPU") for node in nodes):
        return
    for name, (resource, wanted) in wants.items():
        most = max(node.get(resource, 0) for node in nodes)
        if wanted > most:
            unit = 2**30 if resource == "memory" else 1
            raise ResourceError(
                f"--engine-option {name}={wanted / unit:g}: no machine of this Ray cluster has so many; "
                f"the most is {most / unit:g}"
            )


@dataclass(kw_only=True)
class _RayChild:
    """A run that Ray executes."""

    ray: Any
    ref: Any
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None and self.ray.wait([self.ref], timeout=0)[0]:
            self.code = self._outcome()
        return self.code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.1)
        return code

    def send_signal(self, number: int) -> None:
        self.ray.cancel(self.ref, force=False)

    def kill(self) -> None:
        self.ray.cancel(self.ref, force=True)

    def _outcome(self) -> int:
        exceptions = self.ray.exceptions
        try:
            return int(self.ray.get(self.ref))
        except exceptions.TaskCancelledError:
            return STOPPED
        except exceptions.OutOfMemoryError as error:
            note_failure(self.log, f"Ray ended it, memory ran out: {one_line(str(error))[:300]}")
            return ResourceError.exit_code
        except exceptions.RayError as error:
            said = [line for line in str(error).splitlines() if line.strip()]
            note_failure(self.log, f"Ray could not carry it out: {one_line(said[-1])[:300] if said else error!r}")
            return 1
