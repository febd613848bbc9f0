"""The patch records: every Megatron symbol that the plugin replaces, and why.

Each replacement calls the original unless an ``--asyncpp-schedule`` was asked for. Megatron looks these symbols up in
their module's globals at every call, so it doesn't matter who imported Megatron first.
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_asyncpp import arguments, models, muon_preset
from megatron_asyncpp.errors import AsyncPPError, leave
from megatron_asyncpp.integration.checkpoint import CHECKPOINT, expected_keys
from megatron_asyncpp.integration.moe import LEFT_TO_THE_STEP
from megatron_asyncpp.integration.patching import VERSIONS, Patch
from megatron_asyncpp.integration.waits import WAITS


def _add_megatron_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return arguments.add_arguments(original(parser))

    return add_megatron_arguments


def _check_or_leave(args: Namespace) -> None:
    try:
        arguments.check(args, sys.argv[1:])
    except AsyncPPError as error:
        leave(error)


@contextmanager
def _model_in_argv() -> Iterator[None]:
    """Within the context, the flags of the model that the command line names stand on it, before the others."""
    program, *argv = given = sys.argv
    try:
        words, told = models.expanded(argv), models.described(argv)
    except AsyncPPError as error:
        leave(error)
    if told is not None and int(os.environ.get("RANK", "0")) == 0:
        print(f"megatron_asyncpp: {told}", flush=True)
    sys.argv = [program, *words]
    try:
        yield
    finally:
        sys.argv = given


def _parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_args(*positional: Any, **named: Any) -> Namespace:
        with _model_in_argv():
            args: Namespace = original(*positional, **named)
        _check_or_leave(args)
        if (preset := getattr(args, "asyncpp_muon_preset", None)) is not None:
            muon_preset.apply(args, preset, sys.argv[1:])
        return args

    return parse_args


def _validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Namespace, *positional: Any, **named: Any) -> Any:
        result = original(args, *positional, **named)
        _check_or_leave(args)
        return result

    return validate_args


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(
        forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, *positional: Any, **named: Any
    ) -> Any:
        from megatron.training import get_args

        from megatron_asyncpp.integration.run import running

        args = get_args()
        _check_or_leave(args)  # once more: only now is train_iters known if the run was given in samples
        config = arguments.config_from(args)
        if config is None:
            return original(forward_step_func, model, optimizer, opt_param_scheduler, *positional, **named)
        with running(config, args, model, optimizer, opt_param_scheduler):
            return original(forward_step_func, model, optimizer, opt_param_scheduler, *positional, **named)

    return train


def _get_forward_backward_func(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_forward_backward_func(*positional: Any, **named: Any) -> Callable[..., Any]:
        from megatron.training import get_args

        from megatron_asyncpp.integration.run import current

        megatron_func: Callable[..., Any] = original(*positional, **named)
        run = current()
        if run is None:
            return megatron_func

        @functools.wraps(megatron_func)
        def forward_backward_func(*, forward_only: bool = False, **call: Any) -> Any:
            if forward_only:  # evaluation, between two calls: the parameters are the newest version
                return megatron_func(forward_only=True, **call)
            for name in ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"):
                if call.pop(name, None) is not None:
                    raise RuntimeError(f"a schedule of megatron_asyncpp can't honour {name}")
            del call["model"]  # the one that the pipeline was set up with
            if run.trace is not None:
                run.trace.iteration(get_args().curr_iteration + 1)
            return run.pipeline.forward_backward(**call)

        return forward_backward_func

    return get_forward_backward_func


def _optimizer_state_keys(original: property) -> property:
    def optimizer_state_keys(self: Any) -> tuple[str, ...]:
        from megatron.training import get_args

        assert original.fget is not None
        keys: tuple[str, ...] = original.fget(self)
        config = arguments.config_from(get_args())
        return keys if config is None else (*keys, *expected_keys(config))

    return property(optimizer_state_keys, doc=original.__doc__)


PATCHES = (
    Patch(
        "megatron.training.arguments:add_megatron_arguments",
        _add_megatron_arguments,
        "adds the --asyncpp-* flags to Megatron's",
        VERSIONS,
    ),
    Patch(
        "megatron.training.arguments:parse_args",
        _parse_args,
        "sets the flags of --asyncpp-model; checks the request as soon as it is known, before Megatron's own "
        "assertions and any process group; sets what --asyncpp-muon-preset asks for",
        VERSIONS,
    ),
    Patch(
        "megatron.training.arguments:validate_args",
        _validate_args,
        "checks it again, since Megatron derives some arguments from others here",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:train",
        _train,
        "builds the stage's pipeline around Megatron's training loop, where model and iteration are known",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:get_forward_backward_func",
        _get_forward_backward_func,
        "gives the loop the pipeline's forward_backward in place of Megatron's schedule",
        VERSIONS,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.optimizer_state_keys",
        _optimizer_state_keys,
        "saves what a correction keeps from step to step with the sharded optimizer state: Megatron lists Adam's only",
        VERSIONS,
    ),
    *WAITS,
    *LEFT_TO_THE_STEP,
    *CHECKPOINT,
)
