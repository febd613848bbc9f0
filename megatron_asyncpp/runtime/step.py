"""The optimizer step of a stage in two halves, so that no stage waits for another at the end of an iteration.

begin(k), when batch k's gradients are final on this stage: keep them, start to sum over all ranks what the step needs
to know, and return at once. finish(k), just before the stage first needs V(k+1): clip by the norm of the whole model,
run the inner optimizers, advance the learning-rate schedule. The sums have had M - P + 1 microbatches to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, override

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_asyncpp.optim.correction import Correction
from megatron_asyncpp.optim.leaves import inner_optimizers, leaves, replicas
from megatron_asyncpp.runtime.agreement import Agreement, Handle, total
from megatron_asyncpp.runtime.batch_state import BatchState
from megatron_asyncpp.runtime.clock import Clock, Sums
from megatron_asyncpp.runtime.gradients import Gradients, TiedEmbedding, figures_of, gradients_of
from megatron_asyncpp.runtime.weights import WeightRing


@dataclass(frozen=True)
class Outcome:
    """What became of one batch's step; the same on all ranks.

    Attributes:
        batch: k.
        grad_norm: of the whole model, before clipping; None if it wasn't computed.
        zeros_in_grad: None if they weren't counted.
        skipped: whether V(k+1) = V(k), since a gradient wasn't finite.
        requests: for each thing that a rank can ask all ranks for, whether any rank did when the step was begun.
        metrics: sums over all ranks of further figures of the batch.
        idle: the mean over all ranks of ``Clock.share``, from the beginning of the last batch's step to that of this
            one's.
    """

    batch: int
    grad_norm: float | None
    zeros_in_grad: float | None
    skipped: bool = False
    requests: tuple[bool, ...] = ()
    metrics: tuple[float, ...] = ()
    idle: float = 0.0


class Pending(NamedTuple):
    """A step that is begun and not finished: of which batch, and how many samples that has in all."""

    batch: int
    samples: int


class Step(Protocol):
    """The optimizer step of a stage, as the pipeline runs it."""

    @property
    def pending(self) -> Pending | None:
        """The step that is begun and not finished."""

    @property
    def sums_tied_embedding(self) -> bool:
        """Whether it sums a tied embedding's gradient itself, so that finalize_model_grads must not."""

    def begin(self, batch: int, samples: int, delayed: bool) -> None:
        """Batch k's gradients are final on this stage.

        Args:
            batch: k.
            samples: in the batch, over all data-parallel ranks; what the learning-rate schedule counts.
            delayed: whether Error Feedback or another correction, if there is any, corrects this step.
        """

    def poll(self) -> None:
        """Go on with what was begun, without waiting."""

    def finish(self, keep: bool) -> Outcome:
        """Make V(k+1), and advance the learning-rate schedule.

        Args:
            keep: whether V(k) may still be needed.
        """


class WholeStep(Step):
    """Megatron's own step, with its own norm, for schedules without a delay: all stages wait for each other anyway."""

    def __init__(
        self,
        ring: WeightRing,
        model: Any,
        optimizer_step: Callable[[], tuple[bool, Any, Any]],
        scheduler_step: Callable[[int], None],
        clock: Clock,
        stage: Any,
        pipeline: Any,
    ) -> None:
        """Wire it up.

        Args:
            ring: where the new version is written.
            model: the model chunk, wrapped in Megatron's DistributedDataParallel.
            optimizer_step: Megatron's own ``optimizer.step``.
            scheduler_step: Megatron's own ``opt_param_scheduler.step``, which takes a number of samples.
            clock: of this rank.
            stage: the group of all ranks of this stage.
            pipeline: as ``agreement.pipeline_group`` makes it.
        """
        self._ring = ring
        self._model = model
        self._optimizer_step = optimizer_step
        self._scheduler_step = scheduler_step
        self._clock = clock
        self._stage = stage
        self._pipeline = pipeline
        self._begun: Pending | None = None
        self._idle = 0.0  # this rank's part, of the step that is begun

    @property
    @override
    def pending(self) -> Pending | None:
        return self._begun

    @property
    @override
    def sums_tied_embedding(self) -> bool:
        return False

    @override
    def begin(self, batch: int, samples: int, delayed: bool) -> None:
        assert self._begun is None and not delayed
        self._begun = Pending(batch, samples)
        self._idle = self._clock.share() / (self._stage.size() * self._pipeline.size())

    @override
    def poll(self) -> None:
        pass

    @override
    def finish(self, keep: bool) -> Outcome:
        assert self._begun is not None
        (batch, samples), self._begun = self._begun, None
        # Megatron's step begins with a wait for all stages. Here it is made before, where its time can be seen.
        figures = torch.full([1], self._idle, dtype=torch.float64, device=torch.cuda.current_device())
        waiting = self._clock.start(Sums(batch))
        (idle,) = Agreement(total(figures, self._stage, self._pipeline)).wait()
        self._clock.stop(Sums(batch), waiting)
        with self._ring.advance(keep):
            successful, grad_norm, zeros_in_grad = self._optimizer_step()
        if not successful:
            # Of what skips an update, loss scaling is refused at start-up, and a norm threshold has no flag.
            raise RuntimeError(f"the optimizer skipped the update of batch {batch}, which is not supported")
        self._model.reset_param_sync_dispatch_state()
        self._scheduler_step(samples)
        return Outcome(batch, grad_norm, zeros_in_grad, idle=idle)


def _no_metrics() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.float64, device=torch.cuda.current_device())


@dataclass
class _Begun:
    """Between the halves."""

    what: Pending
    gradients: Gradients | None  # None if the masters were stepped at begin
    agreement: Agreement[list[float]]
    metrics: int  # how many of the sums are metrics


class TwoHalfStep(Step):
    """begin(k) and finish(k) on Megatron's leaves: prepare_grads in the one, step_with_ready_grads in the other.

    The sums over all ranks are in fp64, so neither the order of ranks nor how a leaf is sharded shows in a result.
    """

    def __init__(
        self,
        ring: WeightRing,
        model: Any,
        optimizer: Any,
        scheduler_step: Callable[[int], None],
        corrections: Sequence[Correction],
        clock: Clock,
        stage: Any,
        pipeline: Any,
        tied: TiedEmbedding | None,
        skip_nonfinite: bool = False,
        requests: Callable[[], Sequence[bool]] = tuple,
        state: BatchState | None = None,
        metrics: Callable[[], torch.Tensor] = _no_metrics,
    ) -> None:
        """Wire it up.

        Args:
            ring: where the new version is written.
            model: the model chunk, wrapped in Megatron's DistributedDataParallel.
            optimizer: Megatron's, a tree of them.
            scheduler_step: Megatron's own ``opt_param_scheduler.step``. It runs in finish, so learning rate and weight
                decay are those of batch k when u_k is made.
            corrections: of the inner optimizers; they correct the steps of delayed batches, and track those of others.
            clock: of this rank.
            stage: the group of all ranks of this stage.
            pipeline: as ``agreement.pipeline_group`` makes it.
            tied: the tied embedding that this stage has a copy of.
            skip_nonfinite: whether to skip an update whose gradient norm isn't finite.
            requests: what this rank asks all ranks for, as of now. Which ones any rank asked for is in the outcome.
            state: what the batches gather besides gradients. From it finish makes the next version of weights that
                are no parameters.
            metrics: this rank's parts of further figures of the batch whose state is in place: (n,), fp64. Their sums
                over all ranks are in the outcome.
        """
        self._ring = ring
        self._model = model
        self._optimizer = optimizer
        self._leaves = leaves(optimizer)
        self._inner = inner_optimizers(optimizer)
        self._replicas = replicas(optimizer)
        self._scheduler_step = scheduler_step
        self._corrections = corrections
        self._clock = clock
        self._stage = stage
        self._pipeline = pipeline
        self._tied = tied
        self._skip_nonfinite = skip_nonfinite
        self._requests = requests
        self._state = BatchState() if state is None else state
        self._metrics = metrics
        self._count_zeros = bool(optimizer.config.log_num_zeros_in_grad)
        self._begun: _Begun | None = None

    @property
    @override
    def pending(self) -> Pending | None:
        return None if self._begun is None else self._begun.what

    @property
    @override
    def sums_tied_embedding(self) -> bool:
        return True

    @property
    def holds_gradients(self) -> bool:
        """Whether a step must wait for something before it can touch the weights, so that gradients are copied.

        Where nothing is waited for, begin steps the fp32 masters, and finish only publishes them. In fp32 training the
        masters are the weights themselves, and the last stage would need a second buffer for them.
        """
        clips = any(leaf.config.clip_grad > 0.0 for leaf in self._leaves)
        return clips or self._skip_nonfinite or self._tied is not None or self._ring.steps_in_place

    @property
    def held_bytes(self) -> int:
        """The memory that copied gradients take between the halves, all in fp32."""
        return 4 * sum(p.numel() for leaf in self._leaves for p in leaf.get_parameters()) * self.holds_gradients

    @override
    @torch.no_grad()
    def begin(self, batch: int, samples: int, delayed: bool) -> None:
        if self._begun is not None:
            raise RuntimeError(f"begin({batch}) before finish({self._begun.what.batch}): the plan is wrong")
        for correction in self._corrections:
            correction.correcting = delayed
        holds = self.holds_gradients
        gradients = gradients_of(self._leaves, self._model, copy=holds)
        with self._state.of(batch):
            metrics = self._metrics()
        with _blaming_others(batch):
            agreement = Agreement(self._agree(batch, gradients, metrics))
        if not holds:
            for inner in self._inner:
                inner.step()
        gradients.take()
        self._begun = _Begun(Pending(batch, samples), gradients if holds else None, agreement, metrics.numel())

    @override
    def poll(self) -> None:
        if self._begun is not None and not self._begun.agreement.reached:  # asked after every action
            with _blaming_others(self._begun.what.batch):
                self._begun.agreement.poll()

    @override
    @torch.no_grad()
    def finish(self, keep: bool) -> Outcome:
        if self._begun is None:
            raise RuntimeError("a step is finished that wasn't begun: the plan is wrong")
        begun, self._begun = self._begun, None
        waiting = self._clock.start(Sums(begun.what.batch))
        with _blaming_others(begun.what.batch):
            squares, zeros, idle, *more = begun.agreement.wait()
        self._clock.stop(Sums(begun.what.batch), waiting)
        requests, metrics = more[: len(more) - begun.metrics], more[len(more) - begun.metrics :]
        norm = math.sqrt(squares)
        skipped = self._skip_nonfinite and not math.isfinite(norm)
        if keep and self._gathers_lazily and self._model_is_ungathered():
            # Nobody has needed V(k) whole so far, and V(k+1) goes into another buffer.
            self._model.start_param_sync(force_sync=True)
        if skipped:
            self._ring.repeat(keep)
        else:
            with self._ring.advance(keep):
                self._step(begun.gradients, norm)
                self._state.update(begun.what.batch)
            if self._gathers_lazily:
                self._model.reset_param_sync_dispatch_state()  # the next forward gathers it
            self._scheduler_step(begun.what.samples)
        self._state.clear(begun.what.batch)
        return Outcome(
            begun.what.batch,
            norm,
            zeros if self._count_zeros else None,
            skipped,
            tuple(request > 0 for request in requests),
            tuple(metrics),
            idle,
        )

    def _agree(self, batch: int, gradients: Gradients, metrics: torch.Tensor) -> Generator[Handle, None, list[float]]:
        tied = None if self._tied is None else self._tied.start(gradients)
        if tied is not None and self._tied is not None and self._tied.counts:
            # Its squares are those of the sum, which the last stage began to make when its batch ended.
            waiting = self._clock.start(Sums(batch))
            tied.wait()
            self._clock.stop(Sums(batch), waiting)
        idle = self._clock.share() / (self._stage.size() * self._pipeline.size())
        more = [idle, *map(float, self._requests())]
        figures = figures_of(gradients, self._replicas, self._count_zeros, more, metrics)
        sums = yield from total(figures, self._stage, self._pipeline)
        if tied is not None:
            yield tied
        return sums

    def _step(self, gradients: Gradients | None, norm: float) -> None:
        if gradients is None:
            with _already_stepped(self._inner):
                successful = self._optimizer.step_with_ready_grads()
        else:
            gradients.give()
            for leaf in self._leaves:
                if leaf.config.clip_grad > 0.0:
                    clip_grad_by_total_norm_fp32(leaf.get_parameters(), leaf.config.clip_grad, norm)
            successful = self._optimizer.step_with_ready_grads()
            gradients.take()
        assert successful, "step_with_ready_grads() of Megatron's optimizers doesn't fail"

    @property
    def _gathers_lazily(self) -> bool:
        return bool(self._model.ddp_config.overlap_param_gather)

    def _model_is_ungathered(self) -> bool:
        groups = [*self._model.bucket_groups, *self._model.expert_parallel_bucket_groups]
        return any(not group.param_gather_dispatched for group in groups)


@contextmanager
def _blaming_others(batch: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the gradient norm of batch {batch} did not arrive from all ranks, so one of them has failed or hangs "
            f"(--distributed-timeout-minutes is how long the others wait): look for the first error in their output"
        ) from error


@contextmanager
def _already_stepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Within the context their ``step`` does nothing."""
    own = [vars(optimizer).get("step") for optimizer in optimizers]
    for optimizer in optimizers:
        vars(optimizer)["step"] = lambda *_, **__: None
    try:
        yield
    finally:
        for optimizer, step in zip(optimizers, own, strict=True):
            del optimizer.step
            if step is not None:
                vars(optimizer)["step"] = step
