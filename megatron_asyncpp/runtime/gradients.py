"""A batch's gradients between the two halves of its step, while the next batch accumulates into Megatron's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_asyncpp.optim.leaves import stepped
from megatron_asyncpp.runtime.agreement import Handle


@dataclass(frozen=True)
class Gradients:
    """What the inner optimizers will step with, and what of it counts in the norm.

    Attributes:
        held: each stepped tensor with its gradient.
        counted: per leaf, the gradients that count in the norm: those of one of several copies of a weight only.
    """

    held: list[tuple[torch.Tensor, torch.Tensor]]
    counted: list[list[torch.Tensor]]

    def give(self) -> None:
        """Put each gradient in its tensor's ``.grad``."""
        for tensor, gradient in self.held:
            tensor.grad = gradient

    def take(self) -> None:
        """Empty every ``.grad``, so that nothing takes it for the next batch's."""
        for tensor, _ in self.held:
            tensor.grad = None


def gradients_of(leaves: Sequence[Any], model: Any, copy: bool) -> Gradients:
    """The batch's gradients, as Megatron's leaves prepare them once they are final.

    Args:
        leaves: of the optimizer.
        model: the model chunk, wrapped in Megatron's DistributedDataParallel.
        copy: whether to copy those that lie in Megatron's gradient buffers, where the next backward overwrites them.
    """
    for leaf in leaves:
        if leaf.prepare_grads():
            raise RuntimeError("the gradients were scaled, which is not supported")
    buffers = [*model.buffers, *model.expert_parallel_buffers] if copy else []
    overwritten = {buffer.grad_data.untyped_storage().data_ptr() for buffer in buffers}
    held = []
    for leaf in leaves:
        for tensor in leaf.get_parameters():
            if tensor.grad is not None:
                if tensor.grad.untyped_storage().data_ptr() in overwritten:
                    tensor.grad = tensor.grad.clone()
                held.append((tensor, tensor.grad))
    return Gradients(held, [leaf.get_grads_for_grad_norm() for leaf in leaves])


def squares_of(counted: Sequence[Sequence[torch.Tensor]], replicas: Sequence[int]) -> torch.Tensor:
    """This rank's part of the squared norm: the sum of squares, divided by how many ranks hold the same.

    Args:
        counted: gradients of each leaf.
        replicas: of each leaf's gradients.

    Returns:
        A scalar in fp64: no rounding of this sum, whatever its order, then shows in a factor in fp32.
    """
    total = torch.zeros([], dtype=torch.float64, device=torch.cuda.current_device())
    for gradients, copies in zip(counted, replicas, strict=True):
        if gradients:
            norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
            total += torch.stack(norms).square().sum() / copies
    return total


def zeros_of(counted: Sequence[Sequence[torch.Tensor]], replicas: Sequence[int]) -> torch.Tensor:
    """This rank's part of the number of zeros, a scalar in fp64. They are counted before clipping."""
    total = torch.zeros([], dtype=torch.float64, device=torch.cuda.current_device())
    for gradients, copies in zip(counted, replicas, strict=True):
        for gradient in gradients:
            total += (gradient.numel() - torch.count_nonzero(gradient)) / copies
    return total


class TiedEmbedding:
    """The weight that a model's first and last stage share, each with a copy; both must step with one summed gradient.

    Megatron sums it in place as soon as both stages have come, which the last stage waits for.
    """

    def __init__(self, weight: torch.nn.Parameter, leaves: Sequence[Any], sharded: bool, group: Any) -> None:
        """Wire it up.

        Args:
            weight: this stage's copy.
            leaves: of the optimizer.
            sharded: whether only this rank's shard of a gradient is final: it is the same shard on both stages, since
                Megatron puts a shared embedding in a bucket of its own.
            group: of the rank that holds the copy on the first stage and the one that holds it on the last.
        """
        self._weight = weight
        self._sharded = sharded
        self._group = group
        self._stepped = next((t for leaf in leaves if (t := stepped(leaf, weight)) is not None), None)

    @property
    def counts(self) -> bool:
        """Whether this stage's copy is the one that counts in the norm: that of the first stage, which comes last."""
        return not getattr(self._weight, "shared", False)

    def start(self, gradients: Gradients) -> Handle | None:
        """Begin to sum the held gradient over both stages, in place. None if this rank holds nothing of it."""
        gradient = next((gradient for tensor, gradient in gradients.held if tensor is self._stepped), None)
        if gradient is None and not self._sharded:
            # A layer-wise optimizer steps the weight on one data-parallel rank, on either stage maybe another.
            main_grad: torch.Tensor = vars(self._weight)["main_grad"]
            gradient = main_grad.float().clone()
        if gradient is None:
            return None
        work: Handle = torch.distributed.all_reduce(gradient, group=self._group, async_op=True)
        return work


def tied_embedding(model: Any, leaves: Sequence[Any], group: Any) -> TiedEmbedding | None:
    """The tied embedding that this stage has a copy of, or None.

    Args:
        model: the model chunk, wrapped in Megatron's DistributedDataParallel.
        leaves: of the optimizer.
        group: Megatron's embedding group.
    """
    module = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    shares = getattr(module, "share_embeddings_and_output_weights", False) and (
        module.pre_process or module.post_process
    )
    if not shares or group is None or group.size() == 1:
        return None
    weight = module.shared_embedding_or_output_weight()
    return TiedEmbedding(weight, leaves, model.ddp_config.use_distributed_optimizer, group)


class Alone:
    """A process group of one: with it for the embedding's group, Megatron's finalize_model_grads sums nothing."""

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0


def figures_of(
    gradients: Gradients, replicas: Sequence[int], count_zeros: bool, more: Sequence[float], metrics: torch.Tensor
) -> torch.Tensor:
    """This rank's parts of all that is summed over the ranks: squares, zeros, and whatever more there is.

    Args:
        gradients: of this rank.
        replicas: of each leaf's gradients.
        count_zeros: else their number is 0.
        more: further figures that this rank knows.
        metrics: (n,), fp64, further figures on this rank's device.

    Returns:
        (2 + len(more) + n,), fp64.
    """
    squares = squares_of(gradients.counted, replicas)
    zeros = zeros_of(gradients.counted, replicas) if count_zeros else torch.zeros_like(squares)
    # A full() is a kernel; a tensor() would be a copy that waits for the stream.
    known = [squares, zeros, *(torch.full_like(squares, figure) for figure in more)]
    return torch.cat([torch.stack(known), metrics])
