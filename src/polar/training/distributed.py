"""Several processes that train one policy, each with a part of the weights (FSDP2) and of the passes.

Gradients are summed over the processes, never averaged: what they compute together is what one process would compute. All of
them run the same number of passes, for each pass has collective operations; who has none left computes one that counts nothing.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from polar.specs import Float32Array
from polar.training.batch import Layout

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # of processes that wait while the first rolls out; `torchrun` ends them when one dies


class Pass(NamedTuple):
    """A layout to compute; what does not count is computed for company, with weights of 0."""

    layout: Layout
    counts: bool


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; by default there is only this one.

    Attributes:
        rank: 0 rolls out, and writes what is written.
        mesh: of all of them; None for a process alone.
    """

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def shard(self, policy: nn.Module) -> None:
        """Leave this process its part of the weights: each layer is gathered when it is computed, the rest for a pass."""
        if self.mesh is None:
            return
        for layer in _layers(policy):
            fully_shard(layer, mesh=self.mesh)
        fully_shard(policy, mesh=self.mesh)
        for part in policy.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum

    def share(self, passes: Sequence[Layout]) -> list[Pass]:
        """This process's passes, as many as every other's; long ones are dealt first, to whom has the fewest tokens."""
        if self.world == 1:
            return [Pass(each, True) for each in passes]
        dealt: list[list[Layout]] = [[] for _ in range(self.world)]
        sizes = [0] * self.world
        for each in sorted(passes, key=lambda layout: -len(layout.ids)):
            least = sizes.index(min(sizes))
            dealt[least].append(each)
            sizes[least] += len(each.ids)
        shortest = min(passes, key=lambda layout: len(layout.ids), default=None)
        own = dealt[self.rank]
        company = [] if shortest is None else [Pass(shortest, False)] * (max(map(len, dealt)) - len(own))
        return [Pass(each, True) for each in own] + company

    def total(self, values: Float32Array) -> Float32Array:
        """The sum over all processes."""
        if self.world == 1:
            return values
        whole = torch.from_numpy(values.copy())
        dist.all_reduce(whole)
        summed: Float32Array = whole.numpy()
        return summed

    def totals(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sum of each number over all processes."""
        if self.world == 1:
            return dict(sums)
        parts: list[Mapping[str, float]] = [{}] * self.world
        dist.all_gather_object(parts, dict(sums))
        return {name: sum(part.get(name, 0.0) for part in parts) for name in sorted({name for part in parts for name in part})}

    def tell(self, said: T | None) -> T:
        """What the main process says; the others pass None, and wait."""
        if self.world == 1:
            assert said is not None
            return said
        box = [said]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        assert box[0] is not None
        return box[0]


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that `torchrun` started, or this one alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), world, init_device_mesh(kind, (world,)))
    finally:
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is sharded, every process has to ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """This process's part of a tensor, as `pattern` is sharded."""
    if not isinstance(pattern, DTensor):
        return tensor
    return distribute_tensor(tensor.to(pattern.device), pattern.device_mesh, pattern.placements)


def _layers(policy: nn.Module) -> list[nn.Module]:
    """The decoder's layers, by the name that `transformers` gives their list."""
    lists: list[Any] = [each for name, each in policy.named_modules() if name.endswith(".layers")]
    return [layer for each in lists if isinstance(each, nn.ModuleList) for layer in each]
