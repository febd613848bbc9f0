"""Executes the plan of one stage with Megatron's forward_step and backward_step.

There is no schedule logic here: what runs next, on which weights, and what is sent and received in between is all in
the plan. Megatron calls ``forward_backward`` once an iteration, and each call runs the plan up to the next ``Begin``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules as megatron

from megatron_asyncpp.runtime.batch_state import BatchState, TensorPlace
from megatron_asyncpp.runtime.buffers import listed_attributes, unchanged_buffers
from megatron_asyncpp.runtime.check import VersionCheck
from megatron_asyncpp.runtime.clock import Arrival, Clock
from megatron_asyncpp.runtime.gradients import Alone
from megatron_asyncpp.runtime.step import Outcome, Step
from megatron_asyncpp.runtime.weights import WeightRing
from megatron_asyncpp.runtime.wire import CombinedCalls, PostedAhead, Wire
from megatron_asyncpp.schedules.actions import Action, Backward, Begin, Finish, Flush, Forward
from megatron_asyncpp.schedules.exchanges import Exchange, Payload

# Called with every action just before it is executed: how a test or a tool sees what really ran.
observers: list[Callable[[Action], None]] = []


class _InFlight(NamedTuple):
    """A forward whose backward is still to come."""

    action: Forward
    inputs: Any
    outputs: Any


class _Batch:
    """What Megatron's schedule gathers over a batch; forwards of two batches interleave, so each has its own."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())


def _timed(method: Callable[..., None]) -> Callable[..., None]:
    """Tell the clock when the action that is the first argument was executed."""

    @functools.wraps(method)
    def timed(self: Pipeline, action: Action | Exchange, *rest: Any) -> None:
        started = self._clock.start(action)
        method(self, action, *rest)
        self._clock.stop(action, started)

    return timed


class Pipeline:
    """One stage of a pipeline that runs a plan.

    Between two calls no message is half posted, and the model's parameters are the newest version. What stays is the
    stage's in-flight activations and its next input, and maybe a step that is begun and not finished.
    """

    def __init__(
        self,
        plan: Iterator[Action | Exchange],
        model: torch.nn.Module,
        ring: WeightRing,
        step: Step,
        clock: Clock,
        check: VersionCheck | None,
        state: BatchState | None = None,
        per_batch: Sequence[TensorPlace] = (),
        remember: Callable[[], Any] = lambda: None,
        ahead: bool = False,
    ) -> None:
        """Set up a stage.

        Args:
            plan: its actions and exchanges, in order.
            model: the stage's only model chunk, as Megatron wraps it.
            ring: the versions of its weights.
            step: its optimizer step.
            clock: told of all that the stage does.
            check: the debug check of weight versions, or None.
            state: what the batches gather besides gradients; switched with the batch of each forward and backward.
            per_batch: the tensors among it. Another buffer of the model may not change in a forward or backward.
            remember: called before the first forward of each batch; a run that is continued begins with what it gave.
            ahead: whether the plan's exchanges only post their messages.
        """
        self._plan = plan
        self._next = next(plan, None)
        self._model = model
        self._config = megatron.get_model_config(model)
        if self._config.num_microbatches_with_partial_activation_checkpoints is not None:
            raise RuntimeError(
                "num_microbatches_with_partial_activation_checkpoints has no asynchronous plan: unset it"
            )
        self._groups = megatron._build_default_pg_collection()
        self._wire: Wire = (PostedAhead if ahead else CombinedCalls)(self._groups.pp, self._config)
        self._finalize_groups = copy.copy(self._groups)
        if step.sums_tied_embedding:
            self._finalize_groups.embd = Alone()
        self._ring = ring
        self._step = step
        self._clock = clock
        self._ahead = ahead
        self._outcomes: list[Outcome] = []  # that nobody has taken yet
        self._check = check
        self._remember = remember
        self._remembered: dict[int, Any] = {}  # by batch
        self._in_flight: deque[_InFlight] = deque()
        self._batches: dict[int, _Batch] = {}
        self._state = BatchState() if state is None else state
        self._per_batch = per_batch
        # Once is enough: what a forward changes, its first call does, or, with recomputation, its first backward.
        self._unseen = {"a forward", "a backward", "finalize_model_grads"} if ring.versions > 1 else set()
        self._to_send: Any = None  # made by the last action: output tensors, or gradients of input tensors

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run the plan up to the next ``Begin``: what Megatron's forward_backward_func does in one iteration.

        Args:
            forward_step_func: Megatron's, ``(data_iterator, model) -> (output, loss function)``.
            data_iterator: of this stage's microbatches; it runs ahead of the batch by the stage's lead.
            num_microbatches: M.
            seq_length: in tokens, before sequence and context parallelism.
            micro_batch_size: in sequences.
            decoder_seq_length: in tokens, if it isn't ``seq_length``.
            force_all_reduce: all-reduce the gradients instead of reduce-scattering them.

        Returns:
            What the loss function reported for each microbatch of this batch; empty except on the last stage.
        """
        config = self._config
        if isinstance(data_iterator, list):
            (data_iterator,) = data_iterator
        shapes = megatron.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=self._groups.tp,
            cp_group=self._groups.cp,
        )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        gradient_sync = _GradientSync(config, self._model, self._wire.is_first)
        for action in self._run_until_begin():
            if isinstance(action, Exchange):
                self._exchange(action, shapes)
            elif isinstance(action, Forward):
                self._forward(action, forward_step_func, data_iterator, num_microbatches)
            elif isinstance(action, Backward):
                if action.microbatch + 1 == num_microbatches:
                    gradient_sync.last_backward_comes()
                self._backward(action)
            elif isinstance(action, Finish):
                self._finish(action)
            elif isinstance(action, Flush):
                self._flush(action)
            self._step.poll()
        gradient_sync.end()
        self._rest()
        assert isinstance(self._next, Begin)
        batch = self._batches.pop(self._next.batch)
        with _kept_gathers(self._model), self._end_of_batch(self._next.batch):
            config.finalize_model_grads_func(
                [self._model],
                batch.tokens if config.calculate_per_token_loss else None,
                pg_collection=self._finalize_groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return batch.losses

    def optimizer_step(self, samples: int) -> Outcome | None:
        """Begin the step of the batch that the last call ran, and finish it if the plan does so at once.

        Args:
            samples: in the batch, over all data-parallel ranks; what the learning-rate schedule counts.

        Returns:
            The outcome of this very step, or None if it isn't finished yet.
        """
        begin = self._take()
        assert isinstance(begin, Begin)
        started = self._clock.start(begin)
        self._step.begin(begin.batch, samples, begin.delayed)
        self._clock.stop(begin, started)
        self._remembered.pop(begin.batch, None)
        while isinstance(self._next, Finish):
            self._finish(self._take())
        self._rest()
        finished = bool(self._outcomes) and self._outcomes[-1].batch == begin.batch
        return self._outcomes[-1] if finished else None

    @property
    def next_step(self) -> int:
        """The batch whose step is the next to begin, between ``forward_backward`` and ``optimizer_step``."""
        assert isinstance(self._next, Begin)
        return self._next.batch

    @property
    def pending_samples(self) -> int:
        """The samples of a batch whose step is begun and not finished: the learning-rate schedule lags by so many."""
        return 0 if self._step.pending is None else self._step.pending.samples

    def finish_early(self) -> None:
        """Finish what is under way, so that the parameters are V(k+1): for who looks at them between two calls.

        All ranks must call it between the same two calls. The next batch still runs on V(k), so that stays in the ring.
        """
        self._wire.settle()
        if self._step.pending is not None:
            self._complete(Finish(self._step.pending.batch, keeps=True))
            self._rest()

    @property
    def remembered(self) -> Any:
        """What ``remember`` gave before the first forward of the batch that comes next, or None if none has run."""
        return next(iter(self._remembered.values()), None)

    @contextlib.contextmanager
    def showing_stale(self) -> Iterator[None]:
        """Within the context, between two calls, the parameters are the version before the newest."""
        self._ring.lend(self._ring.newest - 1)
        try:
            yield
        finally:
            self._ring.lend(self._ring.newest)

    @property
    def newest(self) -> int:
        """The index of the newest version, which is that of the batch that comes next if no step is pending."""
        return self._ring.newest

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes of the steps that were finished since it was last asked, in order; the same on all ranks."""
        taken, self._outcomes = self._outcomes, []
        return taken

    def _flush(self, action: Flush) -> None:
        if self._in_flight:
            raise RuntimeError(f"flush after batch {action.batch} with forwards in flight: the plan is wrong")
        self._wire.settle()

    def _finish(self, action: Finish) -> None:
        if self._step.pending is not None and self._step.pending.batch == action.batch:  # else it was finished early
            self._complete(action)

    @_timed
    def _complete(self, action: Finish) -> None:
        self._outcomes.append(self._step.finish(action.keeps))

    def _run_until_begin(self) -> Iterator[Action | Exchange]:
        while not isinstance(self._next, Begin):
            yield self._take()

    def _take(self) -> Any:
        action, self._next = self._next, next(self._plan, None)
        if action is None:
            raise RuntimeError("the plan has no more batches, but Megatron's loop goes on: train_iters changed")
        if not isinstance(action, Exchange):
            for observe in observers:
                observe(action)
        return action

    @_timed
    def _exchange(self, exchange: Exchange, shapes: Any) -> None:
        self._wire.exchange(exchange, self._to_send, shapes)
        if exchange.send == "forward":
            # Only the graph of an output is needed once it was sent.
            megatron.deallocate_output_tensor(self._to_send, self._config.deallocate_pipeline_outputs)
        if exchange.send is not None:
            self._to_send = None

    def _arrived(self, payload: Payload) -> Any:
        if not self._ahead:
            return self._wire.take(payload)  # the exchange waited for it
        waiting = self._clock.start(Arrival(payload))
        received = self._wire.take(payload)
        self._clock.stop(Arrival(payload), waiting)
        return received

    @_timed
    def _forward(self, action: Forward, function: Callable[..., Any], data: Any, num_microbatches: int) -> None:
        self._lend(action)
        if action.microbatch == 0:
            self._remembered[action.batch] = self._remember()
        batch = self._batches.setdefault(action.batch, _Batch())
        inputs = self._arrived("forward")
        with contextlib.ExitStack() as watched:
            if self._check:
                watched.enter_context(self._check.watch())
            watched.enter_context(self._unchanged("a forward"))
            outputs, tokens = megatron.forward_step(
                function,
                data,
                self._model,
                num_microbatches,
                inputs,
                batch.losses,
                self._config,
                cp_group_size=self._groups.cp.size(),
                is_first_microbatch=action.microbatch == 0,
                current_microbatch=action.microbatch,
                is_last_stage=self._wire.is_last,
            )
        batch.tokens += tokens
        self._in_flight.append(_InFlight(action, inputs, outputs))
        self._to_send = outputs

    @_timed
    def _backward(self, action: Backward) -> None:
        forward, inputs, outputs = self._in_flight.popleft()
        ran = (forward.microbatch, forward.batch, forward.version)
        if ran != (action.microbatch, action.batch, action.version):
            raise RuntimeError(f"{action} follows {forward}: the plan is wrong")
        self._lend(action)
        received = self._arrived("backward")
        with self._unchanged("a backward"):
            self._to_send = megatron.backward_step(inputs, outputs, received, self._config)

    def _lend(self, action: Forward | Backward) -> None:
        self._ring.lend(action.version)
        self._state.lend(action.batch)

    def _rest(self) -> None:
        self._ring.lend(self._ring.newest)
        self._state.lend(None)

    @contextlib.contextmanager
    def _end_of_batch(self, batch: int) -> Iterator[None]:
        """Once, whoever follows a batch's end is shown what it gathered, so that a change of a weight isn't missed."""
        watched = "finalize_model_grads" in self._unseen
        with (
            self._state.copy_of(batch) if watched else contextlib.nullcontext(),
            self._unchanged("finalize_model_grads"),
        ):
            yield

    @contextlib.contextmanager
    def _unchanged(self, what: str) -> Iterator[None]:
        """Once for each: refuse undeclared changes of buffers; in debug mode list those of other attributes as well."""
        if what not in self._unseen:
            yield
            return
        self._unseen.remove(what)
        with contextlib.ExitStack() as watched:
            attributes: list[str] = []
            if self._check:
                attributes = watched.enter_context(listed_attributes(self._model, self._per_batch))
            watched.enter_context(unchanged_buffers(self._model, self._per_batch, what))
            yield
        for attribute in attributes:
            print(
                f"megatron_asyncpp: {what} changes the tensor attribute {attribute}: right if it is set and read "
                f"within one forward, else say with megatron_asyncpp.declare_state what it belongs to",
                flush=True,
            )


@contextlib.contextmanager
def _kept_gathers(model: Any) -> Iterator[None]:
    """Keep Megatron's notes of which parameters were gathered, which its finalize_model_grads forgets.

    A step follows it there, after which everything has to be gathered again. Here that may be much later.
    """
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    dispatched = [group.param_gather_dispatched for group in groups]
    yield
    for group, was in zip(groups, dispatched, strict=True):
        group.param_gather_dispatched = was


class _GradientSync:
    """Keeps the data-parallel gradient reduction off until the batch's last backward, as Megatron's schedule does."""

    def __init__(self, config: Any, model: torch.nn.Module, first_stage: bool) -> None:
        self._config = config
        self._model = model
        self._at_last_backward = config.grad_sync_func is None or first_stage
        self._off = contextlib.ExitStack()
        self._off.enter_context((config.no_sync_func or contextlib.nullcontext)())

    def last_backward_comes(self) -> None:
        """Let the buckets be reduced as the last backward fills them."""
        if self._at_last_backward:
            self._off.close()

    def end(self) -> None:
        """After the last backward: reduce what isn't on its way yet."""
        if not self._at_last_backward:
            self._off.close()
            self._config.grad_sync_func(self._model.parameters())
