"""How a model is laid out over ranks, and the checks that Megatron makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning.architecture import Architecture, DeltaNet, LatentAttention


@dataclass(frozen=True)
class Layout:
    """Sizes of parallelism.

    Attributes:
        world: ranks.
        tensor: TP.
        stages: layers of each pipeline stage, from the first to the last.
        context: CP.
        expert: EP.
        expert_tensor: TP of experts.
        sequence_parallel: whether activations between tensor-parallel regions are sharded too.
    """

    world: int
    tensor: int
    stages: tuple[int, ...]
    context: int
    expert: int
    expert_tensor: int
    sequence_parallel: bool

    @property
    def pipeline(self) -> int:
        """P, the number of stages."""
        return len(self.stages)

    @property
    def data(self) -> int:
        """Replicas, each of which trains on its own samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    def check(self, model: Architecture) -> None:
        """Check that Megatron would take this layout for this model.

        Raises:
            AsyncPPError: it wouldn't; the message names the flag.
        """
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--context-parallel-size": self.context,
            "--expert-model-parallel-size": self.expert,
            "--expert-tensor-parallel-size": self.expert_tensor,
            "--world-size": self.world,
        }
        for flag, size in sizes.items():
            if size < 1:
                raise AsyncPPError(f"{flag} {size} leaves no rank: give at least 1")
        replica = self.tensor * self.pipeline * self.context
        if self.world % replica:
            raise AsyncPPError(
                f"a replica of the model takes {replica} ranks (tensor x pipeline x context parallel), and "
                f"--world-size {self.world} isn't a multiple of that: change one of them"
            )
        self._check_heads(model)
        self._check_experts(model)

    def _check_heads(self, model: Architecture) -> None:
        for layer in model.layers:
            attention = layer.attention
            counts: tuple[int, ...]
            if isinstance(attention, DeltaNet):
                counts, ranks = (attention.key_heads, attention.value_heads), self.tensor * self.context
            elif isinstance(attention, LatentAttention):
                counts, ranks = (attention.heads,), self.tensor
            else:
                counts, ranks = (attention.heads,), self.tensor
                if attention.groups % ranks and ranks % attention.groups:
                    raise AsyncPPError(
                        f"--num-query-groups {attention.groups} is neither a multiple nor a divisor of "
                        f"--tensor-model-parallel-size {ranks}: change one of them"
                    )
            for count in counts:
                if count % ranks:
                    raise AsyncPPError(
                        f"{count} heads can't be divided over {ranks} ranks: lower --tensor-model-parallel-size"
                        f"{'' if self.context == 1 else ' or --context-parallel-size'}"
                    )

    def _check_experts(self, model: Architecture) -> None:
        experts = model.experts
        if experts is None:
            if self.expert > 1:
                raise AsyncPPError(
                    f"--expert-model-parallel-size {self.expert} divides experts, and the model has none: leave it out"
                )
            return
        if experts.count % self.expert:
            raise AsyncPPError(
                f"{experts.count} experts can't be divided over --expert-model-parallel-size {self.expert}: "
                f"give a divisor of {experts.count}"
            )
        ranks = self.expert_tensor * self.expert * self.pipeline
        if self.world % ranks:
            raise AsyncPPError(
                f"all experts of all stages take {ranks} ranks (expert x expert tensor x pipeline parallel), and "
                f"--world-size {self.world} isn't a multiple of that: change one of them"
            )
        if self.tensor > 1 and not self.sequence_parallel:
            raise AsyncPPError("Megatron trains experts under tensor parallelism with --sequence-parallel only: add it")
