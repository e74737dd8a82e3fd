"""Runs executed by Slurm through submitit: a job array of what can start, each job the same command as everywhere.

Before its time is over, or when it is warned of a preemption, a job has its run saved and submitit queues it again;
a job that is only told to end saves its run too, and the run is submitted anew. Needs the extra `slurm`, imported when
the engine is opened. What submitit writes (its logs, and pickles of its own that nothing of ours reads) lies in
`<study>/slurm`.

Not for: what happens inside a job (`worker`), the order of tasks (`engine`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from equipoise.engine import UNBOUNDED, Engine, Task, command_line
from equipoise.engines.options import SlurmOptions
from equipoise.engines.worker import NO_GPU, STOPPED, Attempt, attempt, carried, note_failure
from equipoise.errors import ConfigError
from equipoise.forks import Child
from equipoise.machine import usable_cores
from equipoise.text import one_line

MAX_ARRAY: Final = 1000
"""Jobs of one array: Slurm's own default allows 1,001 (MaxArraySize)."""
WARN_S: Final = 120
"""Seconds before the end of its time at which a job is told: for one update, and for saving."""
LOOK_S: Final = 2.0
"""Seconds between two looks for the result of a job, a file on a file system that many share."""
LOCAL_S: Final = 0.5
"""The same for submitit's processes on this machine."""
ASK_S: Final = 60.0
"""Seconds between two questions to Slurm about its queue; `LOOK_S` once jobs were told to end."""
END_S: Final = 90.0
"""Seconds after which a job that was told to end has ended, whatever is known of it: Slurm kills it after 30."""


@dataclass(kw_only=True)
class Job:
    """What submitit carries into a job and calls there: a task's command, which is also what goes on after a stop."""

    line: list[str]
    log: str
    environment: dict[str, str]
    running: Attempt | None = None
    """What this process is at, once it is called."""

    def __call__(self) -> int:
        """Carry out the command; its exit code."""
        with attempt(self.line, Path(self.log), self.environment) as self.running:
            # Slurm's way to say that a job has to end now. (SIGINT is how Ctrl-C ends submitit's processes here.)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._stop)
            return self.running.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.running:
            self.running.stop()

    def checkpoint(self) -> Any:
        """Asked by submitit when the job's time is nearly over: save, and say how to go on in the next one."""
        from submitit.helpers import DelayedSubmission

        if self.running:
            self.running.stop()
            self.running.wait()
        return DelayedSubmission(Job(line=self.line, log=self.log, environment=self.environment))


@contextmanager
def slurm_engine(
    options: SlurmOptions,
    *,
    study: Path,
    num_jobs: int | None,
    cpus: int,
    gpus: float,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[Engine]:
    """Slurm, for the time of a `with` block; at most `num_jobs` jobs of an array at a time, None = as Slurm has room.

    ConfigError where there is no Slurm, or when it refuses what it was asked for.
    """
    if options.cluster == "slurm" and not all(map(shutil.which, ("sbatch", "srun", "squeue"))):
        raise ConfigError(
            "--engine slurm: sbatch, srun and squeue are not on the PATH; expected a machine that submits to Slurm "
            "(or --engine commands)"
        )
    import submitit

    logging.getLogger("submitit").setLevel(logging.CRITICAL)  # it would say on stdout what is said here
    cpus = options.cpus or cpus
    executor = submitit.AutoExecutor(
        folder=study.resolve() / "slurm",
        cluster=options.cluster,
        **{f"{options.cluster}_max_num_timeout": options.retries},
    )
    executor.update_parameters(**_parameters(options, study.resolve().name, cpus, int(gpus), num_jobs))
    carries = {**carried(environment), **({} if gpus else NO_GPU)}
    queue = None if options.cluster == "local" else _Queue()

    def start(tasks: Sequence[Task]) -> list[Child]:
        jobs: list[Any] = []
        for first in range(0, len(tasks), MAX_ARRAY):
            calls = [
                Job(line=command_line(task, arguments), log=str(task.log.resolve()), environment=carries)
                for task in tasks[first : first + MAX_ARRAY]
            ]
            try:
                jobs += executor.submit_array(calls)
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
                for job in jobs:
                    job.cancel(check=False)
                raise ConfigError(f"--engine slurm: sbatch refused: {_why_refused(str(error))}") from None
        return [_SlurmChild(job=job, log=task.log, queue=queue) for job, task in zip(jobs, tasks, strict=True)]

    here = options.cluster == "local"  # no scheduler, so nothing else that keeps to the cores there are
    at_a_time = (num_jobs or max(1, usable_cores() // cpus)) if here else UNBOUNDED
    where = "by submitit on this machine" if here else "as Slurm jobs"
    where += f" in partition {options.partition}" if options.partition else ""
    yield Engine(
        start=start,
        num_jobs=at_a_time,
        how=f"{where}, {cpus} core(s)"
        + (f" and {gpus:g} GPU(s)" if gpus else "")
        + f" and {options.minutes} minutes a run"
        + (f", {num_jobs or at_a_time} at a time" if num_jobs or here else ""),
        retries=options.retries,
    )


def _parameters(options: SlurmOptions, name: str, cpus: int, gpus: int, num_jobs: int | None) -> dict[str, Any]:
    """What submitit is told, by its names."""
    found: dict[str, Any] = {"timeout_min": options.minutes, "name": f"equipoise-{name}", "gpus_per_node": gpus}
    if options.cluster == "local":
        return found
    found |= {"cpus_per_task": cpus, "nodes": 1, "tasks_per_node": 1, "slurm_signal_delay_s": WARN_S}
    found |= {"mem_gb": options.memory_gb} if options.memory_gb else {}
    found |= {"slurm_partition": options.partition} if options.partition else {}
    found |= {"slurm_array_parallelism": num_jobs} if num_jobs else {}
    found |= {"slurm_additional_parameters": dict(options.sbatch)} if options.sbatch else {}
    if not gpus:
        del found["gpus_per_node"]  # a cluster without any refuses the word
    return found


def _why_refused(said: str) -> str:
    """What sbatch said, in a line."""
    lines = [line.strip() for line in said.splitlines() if "sbatch: error" in line] or said.strip().splitlines()[-1:]
    return one_line("; ".join(line.removeprefix("sbatch: error: ") for line in lines))[:400]


@dataclass(kw_only=True)
class _Queue:
    """Which jobs Slurm still knows; one question is about all of them, and is not asked often."""

    asked: float = 0.0
    answers: int = 0
    """Questions that Slurm has answered."""
    jobs: frozenset[str] = frozenset()

    def look(self, every_s: float) -> None:
        """Ask again if the last question is so long ago. Slurm that does not answer has lost no job."""
        now = time.monotonic()
        if now - self.asked < every_s:
            return
        self.asked = now
        asked = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format=%i"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if asked.returncode == 0:
            self.answers += 1
            self.jobs = frozenset(asked.stdout.split())


@dataclass(kw_only=True)
class _SlurmChild:
    """A run that a job executes."""

    job: Any
    log: Path
    queue: _Queue | None
    """None: submitit's processes on this machine."""
    told: float | None = None
    """When it was told to end."""
    looked: float = 0.0
    missed: int | None = None
    """Answers about the queue when it was first not there."""
    code: int | None = None

    def poll(self) -> int | None:
        now = time.monotonic()
        if self.code is None and now - self.looked >= (LOOK_S if self.queue else LOCAL_S):
            self.looked = now
            if self._has_result():
                self.code = self._outcome()
            elif self._is_gone() or (self.told and now - self.told > END_S):
                self.code = STOPPED if self.told else self._fail("left no result and is not in the queue any more")
        return self.code

    def _has_result(self) -> bool:
        result: Path = self.job.paths.result_pickle
        with suppress(OSError):  # makes a network file system look again
            result.parent.chmod(result.parent.stat().st_mode)
        return result.exists()

    def _is_gone(self) -> bool:
        """Whether the job has ended, as far as its queue knows: it was not there in two answers."""
        if self.queue is None:
            return bool(self.job.done()) and not self._has_result()
        self.queue.look(LOOK_S if self.told else ASK_S)
        if self.job.job_id in self.queue.jobs or not self.queue.answers:
            self.missed = None
        elif self.missed is None:
            self.missed = self.queue.answers
        return self.missed is not None and self.queue.answers > self.missed

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.1)
        return code

    def send_signal(self, number: int) -> None:
        if self.told:
            return
        self.told = time.monotonic()
        if self.queue:
            self.job.cancel(check=False)
        else:
            with suppress(ProcessLookupError):
                os.kill(int(self.job.job_id), signal.SIGTERM)  # a controller, which passes it on

    def kill(self) -> None:
        self.send_signal(signal.SIGTERM)  # Slurm kills what does not end in time

    def _outcome(self) -> int:
        if self.job.exception() is None:
            return int(self.job.result())
        return STOPPED if self.told else self._fail("failed, or was out of time too often")

    def _fail(self, how: str) -> int:
        note_failure(self.log, f"job {self.job.job_id} {how}; see {self.job.paths.stderr}")
        return 1
