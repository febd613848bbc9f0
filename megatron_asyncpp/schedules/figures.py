"""What a stage's plan costs and how old its gradients are: figures that follow from the order of actions alone."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_asyncpp.schedules.actions import Action, Backward, Compute, Finish, Forward


def peak_activations(plan: Sequence[Action]) -> int:
    """The most microbatches whose forward has run and whose backward hasn't, the one that runs included.

    An input that was received and waits for its forward isn't counted.
    """
    live = peak = 0
    for action in plan:
        if isinstance(action, Compute):
            live += 1 if isinstance(action, Forward) else -1
            peak = max(peak, live)
    return peak


def versions_alive(plan: Sequence[Action]) -> int:
    """The most weight versions that exist at once and of which each is the newest or will be used again."""
    last_use = {action.version: i for i, action in enumerate(plan) if isinstance(action, Compute)}
    alive: set[int] = set()
    peak = 1
    for i, action in enumerate(plan):
        if isinstance(action, Finish):
            newest = action.batch + 1
            alive = {version for version in alive if last_use[version] > i} | {newest}
            last_use.setdefault(newest, i)
            peak = max(peak, len(alive))
        elif isinstance(action, Compute):
            alive.add(action.version)
    return peak


def staleness(plan: Sequence[Action]) -> list[int]:
    """For each batch: updates between the oldest weights that a forward of it ran on, and those it is applied to.

    Batch k's update is applied to V(k), the newest there is then.
    """
    oldest: dict[int, int] = {}
    for action in plan:
        if isinstance(action, Forward):
            oldest[action.batch] = min(action.version, oldest.get(action.batch, action.version))
    return [batch - version for batch, version in sorted(oldest.items())]


def drift(plan: Sequence[Action]) -> int:
    """The most updates between the weights of a microbatch's forward and those of its backward."""
    forward: dict[tuple[int, int], int] = {}
    most = 0
    for action in plan:
        if isinstance(action, Forward):
            forward[action.batch, action.microbatch] = action.version
        elif isinstance(action, Backward):
            most = max(most, action.version - forward[action.batch, action.microbatch])
    return most
