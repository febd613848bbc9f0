"""What a run leaves behind, and how two runs are compared."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]
_LAYER = re.compile(r"(?<=layers\.)\d+")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


@dataclass(frozen=True)
class Action:
    """One action of the plan, as the plugin executed it: kind is the class name in schedules.actions."""

    kind: str
    batch: int
    microbatch: int | None = None
    version: int | None = None


@dataclass
class RankResult:
    """One rank. Weight names are the module's own, without DDP and Float16Module prefixes.

    Attributes:
        losses: the batch loss that each train_step returned, on the last stage; None elsewhere.
        grad_norms: of each batch, as train_step returned it, or, in the plugin, as its step's outcome has it.
        skipped: the batches whose update was skipped (mode "plugin").
        metrics: by Megatron's number of an iteration, the figures of mixtures of experts as TensorBoard gets them.
        learning_rates: the rate of each step of the first inner optimizer, read as the step starts.
        layer_offset: global number of this stage's first layer.
        expert_offset: global number of this rank's first expert of each layer.
        tensor_rank: within its tensor-parallel group.
        splits: for each weight that tensor parallelism splits, the dimension, and in how many parts that are split
            one by one (two for the gate and the other half of a SwiGLU).
        masters: final fp32 masters, where the optimizer keeps some.
        actions: the plan's actions as executed (mode "plugin").
        extra: whatever a hook wants to hand out.
    """

    rank: int = 0
    pipeline_rank: int = 0
    layer_offset: int = 0
    expert_offset: int = 0
    tensor_rank: int = 0
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    tied: bool = False
    losses: list[float | None] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)
    initial: Weights = field(default_factory=dict)
    final: Weights = field(default_factory=dict)
    masters: Weights = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    extra: dict[str, object] = field(default_factory=dict)
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""

    @property
    def versions(self) -> dict[tuple[int, int], tuple[int | None, int | None]]:
        """(batch, microbatch) -> weight versions that its forward and its backward ran on."""
        ran: dict[str, dict] = {"Forward": {}, "Backward": {}}
        for action in self.actions:
            if action.kind in ran:
                ran[action.kind][action.batch, action.microbatch] = action.version
        forwards, backwards = ran["Forward"], ran["Backward"]
        return {key: (forwards.get(key), backwards.get(key)) for key in sorted({*forwards, *backwards})}

    def named(self, kind: str) -> Weights:
        """`initial`, `final` or `masters` with global numbers of layers and experts."""
        weights: Weights = getattr(self, kind)
        return {renumber(name, self.layer_offset, self.expert_offset): tensor for name, tensor in weights.items()}


@dataclass
class Run:
    """All ranks of a run, by rank."""

    ranks: list[RankResult]
    seconds: float

    @property
    def last(self) -> RankResult:
        """A rank of the last stage: the one that has losses."""
        return next((rank for rank in self.ranks if any(x is not None for x in rank.losses)), self.ranks[-1])

    @property
    def losses(self) -> list[float | None]:
        return self.last.losses

    @property
    def grad_norms(self) -> list[float | None]:
        return self.last.grad_norms

    @property
    def learning_rates(self) -> list[float]:
        return self.last.learning_rates

    def merged(self, kind: str) -> Weights:
        """`initial`, `final` or `masters`, named and whole as with one process.

        Replicas are checked against each other. With tied embeddings the last stage's copy is checked against the
        first stage's and left out.
        """
        merged: Weights = {}
        shards: dict[str, dict[int, torch.Tensor]] = {}  # by tensor-parallel rank, where each has its own
        splits: dict[str, tuple[int, int]] = {}
        for rank in self.ranks:
            splits |= {
                renumber(name, rank.layer_offset, rank.expert_offset): split for name, split in rank.splits.items()
            }
            for name, tensor in rank.named(kind).items():
                place = shards.setdefault(name, {})
                shard = rank.tensor_rank if name in splits else 0
                assert torch.equal(tensor, place.setdefault(shard, tensor)), (
                    f"rank {rank.rank}: replicas of {name} differ ({kind})"
                )
        for name, of_ranks in shards.items():
            merged[name] = joined([of_ranks[shard] for shard in sorted(of_ranks)], *splits.get(name, (0, 1)))
        if any(rank.tied for rank in self.ranks) and (copy := merged.pop("output_layer.weight", None)) is not None:
            assert torch.equal(copy, merged["embedding.word_embeddings.weight"]), f"tied embeddings differ ({kind})"
        return merged

    @property
    def partition(self) -> tuple[tuple[str, ...], ...]:
        """The global names of each stage's parameters (for Reference.norm_partition); one tuple per stage.

        A tied weight counts on the first stage only.
        """
        merged = self.merged("initial")
        stages = {rank.pipeline_rank: [name for name in rank.named("initial") if name in merged] for rank in self.ranks}
        return tuple(tuple(stages[stage]) for stage in sorted(stages))


def joined(shards: list[torch.Tensor], dim: int, parts: int) -> torch.Tensor:
    """The whole tensor of a tensor-parallel group's shards, each of which holds its share of every part in turn."""
    if len(shards) == 1:
        return shards[0]
    chunks = [shard.chunk(parts, dim) for shard in shards]
    return torch.cat([torch.cat(part, dim) for part in zip(*chunks, strict=True)], dim)


def renumber(name: str, layers: int, experts: int = 0) -> str:
    """Shift the first numbers of a layer and of an expert in a parameter's name."""
    name = _LAYER.sub(lambda match: str(int(match.group()) + layers), name, count=1)
    return _EXPERT.sub(lambda match: str(int(match.group()) + experts), name, count=1)


def assert_bitwise(left: Run, right: Run, *, weights: bool = True) -> None:
    """Losses of every iteration, and all final weights, are the same bits; else say what differs first and by how much.

    Runs of the same shape are compared rank by rank, others by their merged weights.
    """
    assert left.losses and None not in left.losses, f"no losses: {left.losses}"
    assert len(left.losses) == len(right.losses), f"{len(left.losses)} against {len(right.losses)} iterations"
    for k, (a, b) in enumerate(zip(left.losses, right.losses, strict=True)):
        assert a == b, f"losses differ first at iteration {k}: {a!r} and {b!r}, by {abs((a or 0) - (b or 0)):.3e}"
    if not weights:
        return
    if len(left.ranks) == len(right.ranks):
        for a, b in zip(left.ranks, right.ranks, strict=True):
            compare_weights(a.final, b.final, f"rank {a.rank}, final weights")
            compare_weights(a.masters, b.masters, f"rank {a.rank}, fp32 masters")
    else:
        compare_weights(left.merged("final"), right.merged("final"), "final weights")
        compare_weights(left.merged("masters"), right.merged("masters"), "fp32 masters")


def compare_weights(left: Weights, right: Weights, what: str) -> None:
    """Fail unless both hold the same names and bits; the message names the first and the worst parameter."""
    assert left.keys() == right.keys(), f"{what}: only in one run: {sorted(left.keys() ^ right.keys())}"
    differing = {name: max_difference(left[name], right[name]) for name in left if not same(left[name], right[name])}
    if differing:
        first, worst = next(iter(differing)), max(differing, key=lambda name: differing[name])
        raise AssertionError(
            f"{what}: {len(differing)} of {len(left)} tensors differ; first {first} by {differing[first]:.3e}, "
            f"worst {worst} by {differing[worst]:.3e}"
        )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference; infinite for different shapes or a NaN."""
    if left.shape != right.shape:
        return float("inf")
    difference = (left.double() - right.double()).abs().max().item()
    return difference if difference == difference else float("inf")
