"""Several processes at one run, over torch.distributed: who they are, what they send each other, how they are started.

The first process leads: it alone reads and writes files, hears signals, and tells the others what to do (`followers`).
Every exchange is a no-op for a process that is alone. A process that dies closes its connections, so that the others'
next exchange raises Lost; one that only hangs is given up after half an hour.

Not for: which part of an update is whose (`step`), or what leaders and followers do (`followers`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.errors import ConfigError, EquipoiseError, ResourceError

EXCHANGE: Final = timedelta(minutes=30)
"""How long an exchange within an update waits for the slowest process: what torch gives gloo."""
ORDER: Final = timedelta(days=7)
"""How long a follower waits for an order: the leader may be preparing data, scoring or writing."""


KILLED: Final = -9
"""Exit code of a process that got SIGKILL, as from a system without memory."""


class Lost(EquipoiseError):
    """Another process of the same run has gone, or does not answer."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes at one run, as one of them sees them."""

    rank: int = 0
    """This one, from 0; 0 leads."""
    size: int = 1
    """How many there are."""
    orders: Any = None
    """torch's group for orders, which waits longer than that of all else; None when alone."""

    def share(self, num: int) -> slice:
        """This process's part of `num` things, consecutive; `num` has to be a multiple of the size."""
        each = num // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


ALONE: Final = Group()


@contextlib.contextmanager
def joined(*, rank: int, size: int, local_rank: int, local_size: int, device: str) -> Iterator[Group]:
    """This process's group for a `with` block; where torchrun says the others are, in environment variables.

    NCCL between GPUs, of which each process on a machine takes the one of its number there; gloo on CPUs. When the
    leader leaves the block, also by an error of ours, the followers' last order is to end; unless one of them is lost.
    Raises ConfigError for more processes than GPUs.
    """
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda and local_rank == 0:  # said once; the others wait for this one then, and end with it
        check_devices(local_size, device)
    with _exchanging():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=EXCHANGE)
        group = Group(rank=rank, size=size, orders=dist.new_group(backend="gloo", timeout=ORDER))
    if cuda:
        torch.cuda.set_device(local_rank)
    try:
        yield group
    except Lost:
        raise  # nobody may be there to say it to: closing the connections says it
    except EquipoiseError:
        _end(group)
        raise
    _end(group)


def _end(group: Group) -> None:
    with contextlib.suppress(Lost):
        if group.rank == 0:
            tell(group, {"do": "end"})
    dist.destroy_process_group()


def check_devices(processes: int, device: str) -> None:
    """ConfigError when `processes` on this machine would need more GPUs than torch sees; on CPUs there is no limit."""
    num = torch.cuda.device_count() if device != "cpu" else 0
    if 0 < num < processes:
        raise ConfigError(
            f"{processes} processes: {num} CUDA device(s) are visible; expected 1 to {num}, or --device cpu"
        )


@contextlib.contextmanager
def _exchanging() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo and NCCL; torch's own classes for it are subclasses
        cause = re.sub(r"^\[.*?\] ", "", str(error).partition("\n")[0])  # torch's source line
        raise Lost(f"another process of this run has ended, or does not answer ({cause.partition('. ')[0]})") from None


# ------------------------------------------------------------------------------------------------ exchanges


def tell(group: Group, order: dict[str, Any]) -> None:
    """Send an order (plain JSON values) to every follower."""
    content = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
    with _exchanging():
        dist.broadcast(torch.tensor([len(content)]), 0, group.orders)
        dist.broadcast(content, 0, group.orders)


def hear(group: Group) -> dict[str, Any]:
    """The leader's next order; waits for it."""
    length = torch.zeros(1, dtype=torch.int64)
    with _exchanging():
        dist.broadcast(length, 0, group.orders)
        content = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0, group.orders)
    return dict(json.loads(content.numpy().tobytes()))


def handed_out(group: Group, tensors: Iterable[Tensor]) -> None:
    """Give every follower, in place, what the leader's tensors hold; all have the same shapes and dtypes."""
    if group.size > 1:
        with _exchanging():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)


def send(tensor: Tensor, rank: int) -> None:
    """Send a tensor on the CPU to one process."""
    with _exchanging():
        dist.send(tensor.contiguous(), rank)


def received(tensor: Tensor, rank: int) -> Tensor:
    """`tensor`, on the CPU, filled with what one process sends."""
    with _exchanging():
        dist.recv(tensor, rank)
    return tensor


def any_of(group: Group, flag: bool) -> bool:
    """Whether `flag` is true in any process. It is asked over the CPU, so that no GPU is waited for."""
    if group.size == 1:
        return flag
    flags = torch.tensor([int(flag)])
    with _exchanging():
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def gathered(group: Group, tensor_N: Tensor) -> Tensor:
    """What all processes hold, in their order, as one vector [size · N]; the same N everywhere."""
    if group.size == 1:
        return tensor_N
    parts = [torch.empty_like(tensor_N) for _ in range(group.size)]
    with _exchanging():
        dist.all_gather(parts, tensor_N)
    return torch.cat(parts)


def summed(group: Group, tensor: Tensor) -> Tensor:
    """The sum over all processes, in place; every process gets the same bits."""
    if group.size > 1:
        with _exchanging():
            dist.all_reduce(tensor)
    return tensor


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """All gradients in one vector, so that they are exchanged at once."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def cut_up(vector: Tensor, parameters: Sequence[Tensor]) -> None:
    """Make the gradients of `parameters` the parts of a vector that `flat` made of theirs."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, vector.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)


# ------------------------------------------------------------------------------------------------ starting them


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `equipoise` with `arguments` in so many processes on this machine, as torchrun does; returns the exit code.

    That is 0 when all ended well, 7 when one was killed outright (by the system, when memory ran out), else what the
    leader ended with; and 128 + the number of a signal that this process got. That is passed on, and the processes are
    waited for; so is a second one, which ends them at once.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # here, where nothing is done but waiting; the processes say what there is to say
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "equipoise", *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if KILLED in codes.values():
            return ResourceError.exit_code
        code = codes.get(0, next(iter(codes.values())))
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval.value
    return 0
