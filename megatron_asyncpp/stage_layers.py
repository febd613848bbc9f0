"""How many layers each pipeline stage has, as Megatron divides them, and the sentence if it couldn't."""

from __future__ import annotations

import re

from megatron_asyncpp.errors import AsyncPPError


def even_stages(layers: int, pipeline: int, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """Layers of each stage, the same on all but for the first and the last where those are given.

    Raises:
        AsyncPPError: they can't be divided so.
    """
    if pipeline < 1:
        raise AsyncPPError(f"--pipeline-model-parallel-size {pipeline} leaves no stage: give at least 1")
    fixed = [count for count in (first, last) if count is not None]
    left, stages = layers - sum(fixed), pipeline - len(fixed)
    if left < 0 or (stages < 1 and left) or (stages > 0 and (left % stages or not left)):
        raise AsyncPPError(
            f"{layers} layers can't be divided over --pipeline-model-parallel-size {pipeline}"
            f"{' with that first or last stage' if fixed else ''}: give a divisor, or take layers off with "
            f"--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or say which stage has which "
            f"with --pipeline-model-parallel-layout"
        )
    middle = (left // stages,) * stages if stages > 0 else ()
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,)))


def stages_of(layout: str, layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers of each stage as ``--pipeline-model-parallel-layout`` says, such as ``Et*7|t*8|t*8|t*7L``.

    Args:
        layout: E is the embedding, t a layer, L the loss, | the end of a stage; ``x*n`` and ``(...)*n`` repeat.
        layers: of the model.
        pipeline: P.

    Raises:
        AsyncPPError: it doesn't say so.
    """
    parts = chunks_of(layout)
    whole = "".join(parts)
    if set(whole) - set("EtL") or whole != f"E{'t' * layers}L" or len(parts) != pipeline:
        raise AsyncPPError(
            f"--pipeline-model-parallel-layout {layout} isn't E, {layers} times t and L on {pipeline} stages: give "
            f"each stage its layers, between |"
        )
    return tuple(part.count("t") for part in parts)


def chunks_of(layout: str) -> list[str]:
    """What is between two | of a layout, with its repetitions written out."""
    text = layout.replace(",", "").replace(" ", "")
    while (shorter := re.sub(r"\(([^()]*)\)\*(\d+)|([^()*])\*(\d+)", _repeated, text)) != text:
        text = shorter
    return text.split("|")


def _repeated(match: re.Match[str]) -> str:
    group, times, letter, letter_times = match.groups()
    return str(group * int(times) if group is not None else letter * int(letter_times))
