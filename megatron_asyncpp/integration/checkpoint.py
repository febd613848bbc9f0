"""What an asynchronous run adds to Megatron's checkpoints, and how it continues from them, bit for bit.

A pending step is finished before Megatron saves, so its own part of a checkpoint is V(k+1) with the optimizer's state,
and opens in plain Megatron. Added are the stale weights V(k), which batch k+1 still runs on, under keys of their own.
The random number generators are saved as they were before this stage's first forward of batch k+1. What is in flight
is not saved: a run that continues starts every stage's data at batch k+1 and runs the lead forwards again.
"""

from __future__ import annotations

import functools
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_asyncpp import arguments
from megatron_asyncpp.errors import AsyncPPError, leave
from megatron_asyncpp.integration.patching import VERSIONS, Patch

KEY = "asyncpp"  # of the plugin's part of a checkpoint
_STALE = "asyncpp.stale."  # prefix of the stale weights' keys in a sharded checkpoint


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that Megatron loaded last.

    Attributes:
        folder: of a sharded checkpoint, or the file of this rank's part.
        settings: the arguments of the run that saved it.
        added: the plugin's part, or None if no asynchronous run saved it: ``{"stale": bool}``, and in the format torch
            ``"weights"``, the stale weights by name.
    """

    folder: str
    settings: Namespace | None
    added: dict[str, Any] | None


_loaded: Loaded | None = None
_loading = False  # whether Megatron's load_checkpoint is at work


def loaded() -> Loaded | None:
    """The checkpoint that Megatron loaded last in this process, or None."""
    return _loaded


def random_states() -> dict[str, Any]:
    """The states of all generators that Megatron saves."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: _as_it_is(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def _as_it_is(state: Any) -> Any:
    """A tracker may hold generators in place of their states, which go on as they are used."""
    return state.clone_state() if isinstance(state, torch.Generator) else state


@contextmanager
def _random_states(states: dict[str, Any]) -> Iterator[None]:
    """Within the context the generators are in these states."""
    before = random_states()
    _set_random_states(states)
    try:
        yield
    finally:
        _set_random_states(before)


def _set_random_states(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def stale_weights(model: Any) -> dict[str, torch.Tensor]:
    """The stale weights of the checkpoint that was loaded, by parameter name, as this rank has them.

    All ranks must call it: a sharded checkpoint is read together.

    Args:
        model: the unwrapped model chunk. Its weights are left as they are.
    """
    assert _loaded is not None
    assert _loaded.added is not None
    if "weights" in _loaded.added:
        weights: dict[str, torch.Tensor] = _loaded.added.pop("weights")  # they are needed once
        return weights
    from megatron.core import dist_checkpointing

    # Rows that only pad the vocabulary in this layout may not be in the checkpoint: they stay the newest ones.
    template = _sharded(model, lambda data: data.clone())
    stale: dict[str, torch.Tensor] = dist_checkpointing.load({KEY: {"weights": template}}, _loaded.folder)[KEY][
        "weights"
    ]
    return stale


def restored_keys(config: arguments.AsyncPPConfig) -> tuple[str, ...]:
    """The state keys of the configured corrections that the checkpoint which was loaded has, and were loaded with it.

    What a correction keeps and the checkpoint lacks starts at zero.
    """
    from megatron.training import get_args

    from megatron_asyncpp.integration.run import state_keys

    saved, args = saved_config(), get_args()
    if saved is None or args.no_load_optim or args.finetune:
        return ()
    return tuple(key for key in state_keys(config) if key in state_keys(saved))


def saved_config() -> arguments.AsyncPPConfig | None:
    """The schedule and options of the run that saved the checkpoint; None if it had none, or if nothing was loaded."""
    if _loaded is None or _loaded.settings is None or getattr(_loaded.settings, "no_save_optim", False):
        return None
    return arguments.config_of_saved(_loaded.settings)


def described(config: arguments.AsyncPPConfig, iteration: int, stale: bool) -> list[str]:
    """The start-up lines about the checkpoint that this run continues: what was found, and what is made of it.

    Args:
        config: of this run.
        iteration: that it starts with.
        stale: whether its first batch runs on the checkpoint's stale weights.
    """
    from megatron_asyncpp.integration.run import state_keys

    if _loaded is None or not iteration:
        return []
    saved = saved_config()
    by = "a run without a schedule of this plugin" if saved is None else f"schedule {saved.name}, {saved.correction()}"
    lines = [f"continues a checkpoint at iteration {iteration}, saved by {by}"]
    found = _loaded.added is not None and _loaded.added["stale"]
    if stale:
        lines.append(f"the checkpoint's stale weights are restored: W({iteration}) = V({iteration - 1})")
    elif config.schedule.delay:
        why = "the checkpoint's stale weights are not used" if found else "the checkpoint has no stale weights"
        lines.append(f"{why}: W({iteration}) = V({iteration})")
    configured, restored = state_keys(config), restored_keys(config)
    lines.extend(
        f"{key.replace('_', ' ')} of each weight: "
        + ("restored" if key in restored else "not in what was loaded, so it starts at zero")
        for key in configured
    )
    if saved is not None:
        lines.extend(
            f"{key.replace('_', ' ')} of each weight: dropped, since no correction of this run uses it"
            for key in state_keys(saved)
            if key not in configured
        )
    return lines


def expected_keys(config: arguments.AsyncPPConfig) -> tuple[str, ...]:
    """The keys of what a correction keeps that are in the optimizer's state now: while loading, those that are there.

    A distributed optimizer loads exactly the keys that it lists.
    """
    from megatron_asyncpp.integration.run import state_keys

    return restored_keys(config) if _loading else state_keys(config)


def _sharded(model: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The model's sharded state dict under the stale weights' keys, with another tensor in place of each of its own."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": group})
    sharded = {
        name: value for name, value in sharded.items() if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }

    def replaced(value: Any) -> Any:
        value.data = replace(value.data.detach())
        return value

    dict_list_map_inplace(replaced, sharded)
    add_prefix_for_sharding(sharded, _STALE)
    return sharded


def _generate_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_state_dict(args: Namespace, model: Any, *positional: Any, **named: Any) -> dict[str, Any]:
        from megatron_asyncpp.integration.run import in_halves

        state: dict[str, Any] = original(args, model, *positional, **named)
        run = in_halves()
        if run is not None:  # outside of train() nothing is stale
            (chunk,) = model
            added: dict[str, Any] = {"stale": run.needs_stale()}
            state[KEY] = added
            if added["stale"]:
                with run.pipeline.showing_stale():
                    if args.ckpt_format == "torch_dist":
                        added["weights"] = _sharded(chunk, lambda data: data)
                    else:
                        added["weights"] = {name: weight.detach().clone() for name, weight in run.weights.items()}
        return state

    return generate_state_dict


def _get_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_rng_state(*positional: Any, **named: Any) -> Any:
        from megatron_asyncpp.integration.run import in_halves

        run = in_halves()
        states = None if run is None else run.pipeline.remembered
        if states is None:
            return original(*positional, **named)
        with _random_states(states):
            return original(*positional, **named)

    return get_rng_state


def _load_base_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load_base_checkpoint(*positional: Any, **named: Any) -> Any:
        global _loaded
        from megatron.training import get_args

        asked = arguments.config_from(get_args()) is not None
        try:
            result = original(*positional, **named)
        except SystemExit as stop:
            if not asked or stop.code or get_args().exit_on_missing_checkpoint:
                raise
            # Megatron prints why, and leaves as if all was well.
            sys.exit("megatron_asyncpp: the checkpoint can't be loaded, for the reason printed above")
        state, folder = result[:2]
        if state is not None and asked:
            _loaded = Loaded(str(folder), state.get("args"), state.get(KEY))
            try:
                _check_layout(_loaded.settings, get_args())
            except AsyncPPError as error:
                leave(error)
        return result

    return _load_base_checkpoint


def _check_layout(saved: Namespace | None, args: Namespace) -> None:
    """Whether Megatron can load the optimizer's state into this run's layout.

    Raises:
        AsyncPPError: it can't.
    """
    if saved is None or args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", False):
        return

    def changed(*names: str) -> str:
        sizes = {name: (getattr(saved, name, 1), getattr(args, name)) for name in names}
        return ", ".join(f"{name} {was} to {now}" for name, (was, now) in sizes.items() if was != now)

    layer_wise = bool(getattr(saved, "use_layer_wise_distributed_optimizer", False))
    sharded = layer_wise or bool(getattr(saved, "use_distributed_optimizer", False))
    of_model = changed("tensor_model_parallel_size", "pipeline_model_parallel_size")
    if of_model and (saved.ckpt_format == "torch" or (sharded and not saved.dist_ckpt_optim_fully_reshardable)):
        raise AsyncPPError(
            f"the checkpoint's optimizer state can't be loaded with {of_model}, since it was saved in the layout of "
            f"its ranks: continue with the same sizes and save once with --ckpt-format torch_dist"
            f"{' --dist-ckpt-optim-fully-reshardable' if sharded else ''}, or add --no-load-optim"
        )
    if layer_wise and (of_data := changed("data_parallel_size")):
        raise AsyncPPError(
            f"the state of a layer-wise optimizer can't be loaded with {of_data}: Megatron saves it for a fixed number "
            f"of data-parallel ranks; continue with the same, or add --no-load-optim"
        )


def check_buckets(args: Namespace, optimizer: Any) -> None:
    """Whether Megatron can save this optimizer's state in the fully reshardable format, if that is asked for.

    It takes the place of each parameter in a padded buffer for its place in an unpadded one (fixed after 0.19). All
    ranks must call it; where one can't, all leave.
    """
    loads = _loaded is not None and bool(getattr(_loaded.settings, "dist_ckpt_optim_fully_reshardable", False))
    if not (loads or (args.save and args.dist_ckpt_optim_fully_reshardable)):
        return
    from megatron_asyncpp.optim.leaves import leaves

    padded = any(
        bucket.numel_unpadded < bucket.grad_data.numel()
        for leaf in leaves(optimizer)
        for buffer in getattr(leaf, "buffers", ())
        for bucket in buffer.buckets[:-1]
    )
    wrong = torch.tensor([int(padded)], device=torch.cuda.current_device())
    torch.distributed.all_reduce(wrong)
    if wrong.item():
        leave(
            AsyncPPError(
                "--dist-ckpt-optim-fully-reshardable would corrupt the optimizer state, since a bucket of gradients "
                "that isn't the last one ends in padding, which Megatron 0.19 overlooks: raise --ddp-bucket-size until "
                "there is one bucket, or leave the flag out"
            )
        )


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(ddp_model: Any, optimizer: Any, *positional: Any, **named: Any) -> Any:
        global _loading
        from megatron.training import get_args

        config = arguments.config_from(get_args())
        if config is None or optimizer is None:
            return original(ddp_model, optimizer, *positional, **named)
        _loading = True
        try:
            with _expecting_corrections(config, optimizer):
                result = original(ddp_model, optimizer, *positional, **named)
        finally:
            _loading = False
        _drop_others(config, optimizer)
        return result

    return load_checkpoint


def _drop_others(config: arguments.AsyncPPConfig, optimizer: Any) -> None:
    """Drop what corrections that aren't configured left in the optimizers' state, so that it isn't saved again."""
    from megatron_asyncpp.integration.run import STATE_KEYS, state_keys
    from megatron_asyncpp.optim.leaves import inner_optimizers

    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            for key in STATE_KEYS - set(state_keys(config)):
                state.pop(key, None)


@contextmanager
def _expecting_corrections(config: Any, optimizer: Any) -> Iterator[None]:
    """Let the optimizers initialise what a correction keeps as well, if the checkpoint has it: only that is loaded."""
    from megatron_asyncpp.optim.leaves import leaves

    def with_kept(initialise: Callable[..., Any] | None, leaf: Any) -> Callable[..., Any]:
        def initialised(*positional: Any, **named: Any) -> Any:
            result = None
            if initialise is not None:
                result = initialise(*positional, **named)
            else:  # Megatron has nothing for SGD, and so can't load its state from a sharded checkpoint
                _initialise_sgd(leaf.optimizer)
            for key in restored_keys(config):
                for group in leaf.optimizer.param_groups:
                    for p in group["params"]:
                        leaf.optimizer.state[p].setdefault(key, torch.zeros_like(p))
            return result

        return initialised

    names = ("init_state_fn", "_init_optimizer_states_with_dummy_values")
    undo: list[Callable[[], None]] = []
    for leaf in leaves(optimizer):
        for name in names:
            if hasattr(leaf, name):
                before = vars(leaf).get(name)
                vars(leaf)[name] = with_kept(getattr(leaf, name), leaf)
                undo.append(functools.partial(_put_back, leaf, name, before))
    try:
        yield
    finally:
        for one in undo:
            one()


def _initialise_sgd(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else ():
            optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


CHECKPOINT = (
    Patch(
        "megatron.training.checkpointing:generate_state_dict",
        _generate_state_dict,
        "adds the stale weights that the next batch still runs on",
        VERSIONS,
    ),
    Patch(
        "megatron.training.checkpointing:get_rng_state",
        _get_rng_state,
        "saves the generators as they were before the next batch's first forward, which a continued run repeats",
        VERSIONS,
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        _load_base_checkpoint,
        "takes note of which checkpoint is loaded, since the stale weights are read when training starts",
        VERSIONS,
    ),
    Patch(
        "megatron.training.training:load_checkpoint",
        _load_checkpoint,
        "lets the optimizers load what a correction keeps from step to step",
        VERSIONS,
    ),
)
