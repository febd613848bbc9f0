"""What a stage does, as data. A plan is an iterator of these actions, in the order in which its stage executes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of one microbatch on V(version)."""

    microbatch: int
    batch: int
    version: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of one microbatch on V(version): the weights of its forward, if the schedule keeps them."""

    microbatch: int
    batch: int
    version: int


@dataclass(frozen=True, slots=True)
class Flush:
    """The pipeline is empty here: nothing is in flight on this stage, and nothing was sent ahead to it."""

    batch: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The batch's gradients are final: begin its optimizer step. Megatron's call for the batch ends here.

    ``delayed`` says whether the batch is of an asynchronous part of the run, the only one that Error Feedback corrects.
    """

    batch: int
    delayed: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish the batch's optimizer step: V(batch + 1) exists from here on.

    ``keeps`` says whether V(batch) may still be needed. If not, the step is made in place and takes no other buffer;
    if so, it takes a free one, or that of the oldest version if the ring is full.
    """

    batch: int
    keeps: bool = True


Compute = Forward | Backward
Action = Forward | Backward | Flush | Begin | Finish


@dataclass(frozen=True, slots=True)
class Batch:
    """What a schedule must know of one batch.

    Attributes:
        index: k, counted from zero; Megatron calls it iteration k.
        microbatches: M.
        version: the weights W(k) that all of it runs on, as the index of V.
        flush: whether the pipeline drains after it (the last batch of a run does).
        delayed: whether it is of an asynchronous part of the run. Its weights may still be the newest: the first
            batch of such a part has no older ones.
    """

    index: int
    microbatches: int
    version: int
    flush: bool
    delayed: bool = False
