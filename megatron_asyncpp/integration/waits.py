"""The places outside of the optimizer step where Megatron's training loop waits for all stages, one record each.

In each iteration every rank would wait here for the slowest stage, and one such wait brings back (P-1)*B of bubble.
Each replacement calls the original unless the run's optimizer step has two halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_asyncpp import arguments
from megatron_asyncpp.integration import log, moe
from megatron_asyncpp.integration.patching import VERSIONS, Patch


def _in_halves() -> Any:
    from megatron_asyncpp.integration.run import in_halves

    return in_halves()


def _known_to_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduced(value: Any, group: Any = None) -> Any:
        return original(value, group=group) if _in_halves() is None else value

    return reduced


def _get_canonical_lr_for_logging(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_canonical_lr_for_logging(param_groups: Any) -> float | None:
        run = _in_halves()
        if run is None:
            return original(param_groups)
        # Megatron logs the rate after the iteration's step. The schedule depends on the number of samples alone, so it
        # can be looked up ahead of a step that is still to be finished.
        samples = run.pipeline.pending_samples
        run.scheduler_step(samples)
        rate: float | None = original(param_groups)
        run.scheduler_step(-samples)
        return rate

    return get_canonical_lr_for_logging


def _elapsed(original: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> float:
        return original(self, reset=reset, barrier=barrier and _in_halves() is None)

    return elapsed


def _training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_log(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *rest: Any, **kw: Any
    ) -> Any:
        from megatron.training import get_args

        from megatron_asyncpp.integration.run import current

        run = current()
        if run is not None:
            for outcome in run.pipeline.take_outcomes():
                own, microbatches = run.iterations.pop(outcome.batch)
                run.exits.learn(outcome.requests)
                run.lagging.add(own, outcome, lagging=own < iteration)
                run.lagging.add_idle(own, outcome.idle)
                figures: dict[str, float | None] = {"idle-share": outcome.idle}
                if own < iteration:  # Megatron itself writes those of its own iteration
                    figures |= {"grad-norm": outcome.grad_norm, "num-zeros": outcome.zeros_in_grad}
                log.write(get_args(), own, figures)
                if run.metrics.names:
                    means = moe.report(run.metrics, outcome.metrics, own, microbatches)
                    run.lagging.add_means(own, means, lagging=own < iteration)
        return original(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **kw)

    return training_log


def _report(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def report(self: Any, *positional: Any, **named: Any) -> Any:
        from megatron_asyncpp.runtime.moe_metrics import SummedTracker

        run = _in_halves()
        if run is None or isinstance(self, SummedTracker):
            return original(self, *positional, **named)
        asked = tuple(named.get("track_names") or ())
        if asked != run.metrics.names:
            raise RuntimeError(f"Megatron logs {asked}, but {run.metrics.names} were summed")
        return ""

    return report


def _print_rank_last(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def print_rank_last(message: str) -> None:
        from megatron_asyncpp.integration.run import current

        run = current()
        if run is not None and " elapsed time per iteration (ms): " in message:
            message += run.lagging.text()
        original(message)

    return print_rank_last


def _checkpoint_and_decide_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint_and_decide_exit(*positional: Any, **named: Any) -> Any:
        from megatron.training import get_args

        run, args = _in_halves(), get_args()
        if run is None:
            return original(*positional, **named)
        asked = (args.exit_signal_handler, args.exit_duration_in_mins)
        # Megatron asks the world itself once the ranks have agreed, so it leaves as it always does.
        args.exit_signal_handler = asked[0] if run.exits.signal else False
        args.exit_duration_in_mins = asked[1] if run.exits.duration else None
        try:
            return original(*positional, **named)
        finally:
            args.exit_signal_handler, args.exit_duration_in_mins = asked

    return checkpoint_and_decide_exit


def _evaluates(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_the_weights_asked_for(*positional: Any, **named: Any) -> Any:
        from megatron.training import get_args

        config, run = arguments.config_from(get_args()), _in_halves()
        if run is None or config is None or config.eval_weights == "newest" or not run.needs_stale():
            return original(*positional, **named)
        with run.pipeline.showing_stale():
            return original(*positional, **named)

    return _finished_first(on_the_weights_asked_for)


def _finished_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_the_newest_weights(*positional: Any, **named: Any) -> Any:
        from megatron_asyncpp.integration.run import current

        run = current()
        if run is None:
            return original(*positional, **named)
        if run.halves:
            run.pipeline.finish_early()
        with run.clock.paused():
            return original(*positional, **named)

    return on_the_newest_weights


WAITS = (
    Patch(
        "megatron.training.training:logical_and_across_model_parallel_group",
        _known_to_all,
        "all ranks know whether an update was made, from the sum that the step makes anyway",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:reduce_max_stat_across_model_parallel_group",
        _known_to_all,
        "all ranks know gradient norm and number of zeros from that sum, and the learning rate from its schedule",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:get_canonical_lr_for_logging",
        _get_canonical_lr_for_logging,
        "logs the rate that Megatron would, though the step that advances the schedule is finished later",
        VERSIONS,
    ),
    Patch(
        "megatron.core.timers:Timer.elapsed",
        _elapsed,
        "a log line has the last stage's time since the last one, and needs no barrier for it",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:training_log",
        _training_log,
        "takes in the figures of finished steps, and writes each at the iteration that it belongs to",
        VERSIONS,
    ),
    Patch(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report",
        _report,
        "logs the figures of mixtures of experts when they have arrived with the sums that the step makes anyway",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:print_rank_last",
        _print_rank_last,
        "adds the figures of the iteration before to a log line, and the idle share",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:checkpoint_and_decide_exit",
        _checkpoint_and_decide_exit,
        "asks the world about --exit-signal-handler and --exit-duration-in-mins only once the ranks agreed to leave",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:evaluate_and_print_results",
        _evaluates,
        "finishes a step that is begun before it evaluates the newest weights, or shows it the stale ones",
        VERSIONS,
    ),
    *(
        Patch(
            f"megatron.training.training:{name}",
            _finished_first,
            f"finishes a step that is begun before it {does}",
            VERSIONS,
        )
        for name, does in {
            "save_checkpoint_and_time": "saves them with the optimizer's state",
            "disable_forward_pre_hook": "gathers them",
        }.items()
    ),
)
