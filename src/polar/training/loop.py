"""A training run: groups of sessions, a batch, an update, new weights for the engine; and again.

What makes a batch is written down before it is trained on. A run that was killed goes on from its newest checkpoint: batches
that were written down are trained on again from the store, which on a CPU gives the same weights bit by bit, and only what
comes after them is rolled out anew.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from msgspec import Struct

from polar.engines.embedded.models import resolve
from polar.errors import InfrastructureError, PolarError, UsageError
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Observer
from polar.rollout.runner import Node, RunOptions, check_tasks, first, install, open_node
from polar.specs import Task
from polar.store.ledger import Ledger
from polar.training.batch import Batch
from polar.training.checkpoints import Checkpoints, Place
from polar.training.config import TrainConfig
from polar.training.distributed import joined
from polar.training.durable import write_durably
from polar.training.groups import Group, describe, make_batch
from polar.training.leader import Leader, follow
from polar.training.learner import Learner
from polar.training.metrics import Metrics
from polar.training.policy import Policy, load_policy
from polar.training.proof import prove_model
from polar.training.rollouts import GroupRecord, Order, Rollouts, busy_seconds, recorded
from polar.training.schedule import Cursor, Feed
from polar.training.weights import Publisher

TRIES = 4  # batches in which nothing can be learned, one after the other, before a step is passed over


class Watcher(Observer, Protocol):
    """Who is told what happens."""

    def trained(self, step: int, steps: int, values: dict[str, float]) -> None:
        """A step is done."""
        ...


class BatchRecord(Struct, frozen=True):
    """What a step was trained on."""

    step: int
    groups: tuple[GroupRecord, ...]
    cursor: Cursor


@dataclass(frozen=True)
class TrainFolder:
    """Paths that training adds to a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "train" / "config.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "train" / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "train" / "weights"

    @property
    def model(self) -> Path:
        """The trained model, once the run is at its end."""
        return self.path / "model"

    def batch(self, step: int) -> Path:
        return self.path / "train" / "batches" / f"{step:06}.json"


async def train(config: TrainConfig, tasks: Sequence[Task], out: Path, watcher: Watcher) -> TrainFolder:
    """Train until `config.run.steps`; where `out` holds a run of this configuration, go on with it.

    Cancelling it stops cleanly; the same call goes on.

    Raises:
        UsageError: configuration, tasks or folder cannot be used.
        CaptureError: a batch did not prove itself; the weights are as before it.
        InfrastructureError: engine, disk, …; the same call goes on.
    """
    folder = TrainFolder(out)
    _settle(folder, config)
    directory = await asyncio.to_thread(resolve, config.model.path)
    with joined() as ranks:
        learner = Leader(await asyncio.to_thread(_policy, config, directory), config, ranks)
        try:
            await _Run(config, tasks, folder, learner, watcher).go(directory)
        finally:
            await asyncio.to_thread(learner.dismiss)
    return folder


def accompany(config: TrainConfig) -> None:
    """What the other processes of `torchrun` do while the first does `train`: their part of each update, until that is done."""
    with joined() as ranks:
        follow(Learner(_policy(config, resolve(config.model.path)), config, ranks), ranks)


def _policy(config: TrainConfig, directory: Path) -> Policy:
    """The same weights in every process, LoRA's random ones too."""
    torch.manual_seed(config.run.seed)
    return load_policy(directory, config.model)


def _settle(folder: TrainFolder, config: TrainConfig) -> None:
    """Write the configuration down; a run that goes on must go on with the same, but for its length and what is kept.

    Raises:
        UsageError: the folder's run was another.
    """
    if folder.config.is_file():
        before = msgspec.json.decode(folder.config.read_bytes(), type=TrainConfig)
        same = msgspec.structs.replace(before, run=msgspec.structs.replace(config.run, seed=before.run.seed))
        if same != config:
            tables = [name for name in TrainConfig.__struct_fields__ if getattr(same, name) != getattr(config, name)]
            raise UsageError(
                f"{folder.path} was trained with another [{'], ['.join(tables)}]: choose another --out, or set it back"
            )
    write_durably(folder.config, msgspec.json.format(msgspec.json.encode(config)))


class _Run:
    """One run on its way."""

    def __init__(
        self, config: TrainConfig, tasks: Sequence[Task], folder: TrainFolder, learner: Learner, watcher: Watcher
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._folder = folder
        self._learner = learner
        self._watcher = watcher
        self._checkpoints = Checkpoints(folder.checkpoints, config.run.keep)
        self._metrics: Metrics
        self._place = Place()
        self._since = time.time()

    async def go(self, directory: Path) -> None:
        self._place = await asyncio.to_thread(self._checkpoints.restore, self._learner)
        if self._place.step:
            self._watcher.note(f"going on after step {self._place.step}")
        with closing(Metrics(self._folder.path, self._config.run.log, self._place.step)) as self._metrics:
            await self._replay()
            if self._place.step < self._config.run.steps:
                await self._train(directory)
        await asyncio.to_thread(self._learner.export, self._folder.model)

    async def _replay(self) -> None:
        """Train again on what was written down after the checkpoint."""
        while self._place.step < self._config.run.steps and (path := self._folder.batch(self._place.step + 1)).is_file():
            record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            self._watcher.note(f"step {record.step}: training again on the sessions that it had")
            groups = await asyncio.to_thread(recorded, RunFolder(self._folder.path), record.groups, self._config.rollout)
            await self._step(groups, record.cursor, {})

    async def _train(self, directory: Path) -> None:
        wanted = self._config.rollout
        options = RunOptions(
            self._folder.path,
            wanted.engine,
            str(directory),
            wanted.sandbox,
            wanted.concurrency,
            wanted.renderer,
        )
        check_tasks(self._tasks, options)
        folder = RunFolder(self._folder.path)
        async with AsyncExitStack() as stack:
            ledger = Ledger.open(folder.ledger)
            stack.push_async_callback(ledger.close)
            for position, task in enumerate(self._tasks):
                await ledger.add_task(task, position)
            await install(self._tasks, self._watcher)
            node = await stack.enter_async_context(open_node(options, folder, ledger, self._watcher))
            publisher = Publisher(node.backend.policy.engine, self._folder.weights, wanted.publish)
            if not self._place.step:  # a wrong model is found before it is written over
                await self._prove(node, str(directory))
            await publisher.publish(self._save, self._place.step)
            if self._place.step:
                await self._prove(node, f"those of step {self._place.step} in {self._folder.weights}")
            order = Order(self._tasks, self._config.tasks.seed, wanted.group_size)
            feed = Feed(Rollouts(node, order, wanted).group, wanted, self._place.cursor)
            stack.push_async_callback(feed.close)
            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(node.watch())
                    await self._steps(feed, publisher)
                    watch.cancel()
            except* PolarError as errors:
                raise first(errors) from None

    async def _prove(self, node: Node, expected: str) -> None:
        most = self._config.algorithm.max_delta
        self._watcher.note(await prove_model(node.backend.policy, self._learner, expected, most))

    async def _steps(self, feed: Feed, publisher: Publisher) -> None:
        self._since = time.time()
        while self._place.step < self._config.run.steps:
            groups, cursor, spent = await self._rolled_out(feed)
            record = BatchRecord(self._place.step + 1, tuple(map(_record, groups)), cursor)
            await asyncio.to_thread(write_durably, self._folder.batch(record.step), msgspec.json.encode(record))
            await self._step(groups, cursor, spent, publisher)

    async def _rolled_out(self, feed: Feed) -> tuple[list[Group], Cursor, dict[str, float]]:
        """Groups of which at least one teaches something, if there are any among some batches of them."""
        began = time.time()
        groups: list[Group] = []
        for tried in range(TRIES):
            groups += await feed.take(self._place.step)
            _refuse_silence(groups)
            if make_batch(groups, self._config.algorithm, self._place.step) is not None:
                break
            self._watcher.note(f"in none of {len(groups)} groups did rewards differ; rolling out more ({tried + 1} of {TRIES})")
        now = time.time()
        return groups, feed.cursor, {"seconds/rollout": now - began, "groups_too_old": float(feed.too_old)}

    async def _step(
        self, groups: Sequence[Group], cursor: Cursor, spent: dict[str, float], publisher: Publisher | None = None
    ) -> None:
        """Train, publish, write down."""
        step = self._place.step + 1
        batch = make_batch(groups, self._config.algorithm, self._place.step)
        values = describe(groups, self._config.algorithm, batch) | spent
        values |= await self._updated(batch)
        if publisher is not None:
            values |= await publisher.publish(self._save, step)
            values |= await asyncio.to_thread(self._busy, groups)
        self._place = Place(step, cursor)
        self._metrics.write(step, values)  # before the checkpoint: a run that goes on drops lines after it, and never lacks one
        if step % self._config.run.checkpoint_every == 0 or step == self._config.run.steps:
            await asyncio.to_thread(self._checkpoints.write, self._learner, self._place)
        self._watcher.trained(step, self._config.run.steps, values)

    def _save(self, directory: Path) -> None:
        """Write what the engine is given."""
        self._learner.export(directory, adapter=self._config.rollout.publish == "adapter")

    async def _updated(self, batch: Batch | None) -> dict[str, float]:
        if batch is None:
            self._watcher.note("nothing to learn from these sessions: the weights stay as they are")
            return {}
        return await asyncio.to_thread(self._learner.update, batch)

    def _busy(self, groups: Sequence[Group]) -> dict[str, float]:
        """How the time since the last step was spent, by the clock."""
        now, since = time.time(), self._since
        sessions = [sample.result.session_id for group in groups for sample in group.samples]
        busy = busy_seconds(RunFolder(self._folder.path), sessions, since, now)
        sampled = sum(sample.result.accounting.sampled for group in groups for sample in group.samples)
        self._since = now
        seconds = now - since
        return {"seconds/step": seconds, "engine_busy": busy / seconds, "tokens_per_second/rollout": sampled / seconds}


def _refuse_silence(groups: Sequence[Group]) -> None:
    """Sessions that all fail are no experience (C09).

    Raises:
        InfrastructureError: none has a reward.
    """
    results = [sample.result for group in groups for sample in group.samples]
    if all(result.reward is None for result in results):
        last = results[-1]
        raise InfrastructureError(
            f"none of {len(results)} sessions has a reward, so training stops. The last one: {last.error_kind}: {last.error}"
        )


def _record(group: Group) -> GroupRecord:
    return GroupRecord(group.task_id, group.number, tuple(sample.result.session_id for sample in group.samples))
