"""The `plan` command: parameters, memory and speed of a run, before there is one. Nothing of torch is imported."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron_asyncpp import models
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning import alternatives, parameters, speed
from megatron_asyncpp.planning.flags import Request, read
from megatron_asyncpp.planning.memory import BYTES, Row, memory
from megatron_asyncpp.predictions import three_decimals

# Short names of Megatron's flags.
_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
# What a plan is of where Megatron's flags don't say.
_ASSUMED = ("--asyncpp-schedule", "2bw", "--asyncpp-error-feedback", "--bf16", "--use-distributed-optimizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [--model NAME] [options] [-- MEGATRON FLAGS...]"
    parser.add_argument("--model", metavar="NAME", help=f"one of {', '.join(models.MODELS)}")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="GPUs; without it and sizes, the model's own layout"
    )
    for name, flag in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"Megatron's {flag}")
    parser.add_argument("--microbatches", type=int, metavar="M", help="of a batch (default: from --global-batch-size)")
    parser.add_argument("--tflops", type=float, metavar="T", help="of one GPU while it computes, for tokens per day")
    parser.add_argument("--memory-gb", type=float, metavar="GB", help="refuse what takes more than 1e9 times this")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes")
    parser.add_argument(
        "megatron",
        nargs="*",
        metavar="FLAGS",
        help=f"after --: Megatron's and the plugin's flags of the run; without them {' '.join(_ASSUMED)}",
    )


def main(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        AsyncPPError: the flags make no sense together, or it doesn't fit.
    """
    flags, world_size = _flags(args)
    request = read(flags, world_size, args.microbatches)
    if not request.args.bf16:
        raise AsyncPPError("plan counts training in bf16: add --bf16 to Megatron's flags")
    if args.tflops is not None and not args.tflops > 0:
        raise AsyncPPError(f"--tflops {args.tflops:g} computes nothing: give a number above 0")
    rows = memory(request)
    if args.memory_gb is not None:
        _check_fits(request, rows, args.memory_gb * 1e9)
    compared = speed.slowdowns(request.layout.pipeline, request.microbatches)
    print(json.dumps(_json(request, rows, compared, args)) if args.json else _text(request, rows, compared, args))
    return 0


def _flags(args: argparse.Namespace) -> tuple[list[str], int]:
    """The whole command line of the run, and its ranks. What stands later wins, so plan's own sizes do."""
    flags = list(args.megatron) or list(_ASSUMED)
    sizes = [word for name, flag in _SIZES.items() if (n := getattr(args, name)) is not None for word in (flag, str(n))]
    if args.tp is not None and args.tp > 1:
        sizes.append("--sequence-parallel")
    own: list[str] = []
    world_size = args.world_size
    if args.model is not None:
        model = models.model(args.model, "--model")
        own = [models.FLAG, args.model]
        laid_out = sizes or any(word.partition("=")[0] in _SIZES.values() for word in args.megatron)
        if world_size is None and not laid_out:
            world_size, own = model.world_size, [*own, *model.layout]
    if world_size is None:
        raise AsyncPPError("a plan needs --world-size, the number of GPUs: give it")
    return [*own, *flags, *sizes], world_size


def _check_fits(request: Request, rows: list[Row], limit: float) -> None:
    worst = max(rows, key=lambda row: row.total)
    if worst.total <= limit:
        return
    other = alternatives.nearest(request, limit)
    way_out = (
        ", and so does every layout for the same batch on up to 64 times as many GPUs: recompute with "
        "--recompute-granularity full, or take a smaller --micro-batch-size"
        if other is None
        else f": the nearest that fits, for the same batch, is {_layout(other)}"
    )
    raise AsyncPPError(
        f"stage {worst.stage} takes {worst.total / 1e9:.1f} GB, more than --memory-gb {limit / 1e9:g}{way_out}"
    )


def _layout(request: Request) -> str:
    layout = request.layout
    expert = f" --ep {layout.expert} --etp {layout.expert_tensor}" if request.model.experts else ""
    return (
        f"--world-size {layout.world} --tp {layout.tensor} --pp {layout.pipeline}{expert} "
        f"--microbatches {request.microbatches}"
    )


def _json(request: Request, rows: list[Row], compared: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:
    layout = request.layout
    schedules = []
    for name, slower in compared.items():
        figures: dict[str, Any] = {"schedule": name, "slowdown": float(three_decimals(slower))}
        if args.tflops is not None:
            figures["tokens_per_day"] = speed.tokens_a_day(request.model, layout.world, args.tflops, slower)
        schedules.append(figures)
    return {
        "total_parameters": parameters.total_parameters(request.model),
        "active_parameters": parameters.active_parameters(request.model),
        "flops_per_token": speed.flops_per_token(request.model),
        "world_size": layout.world,
        "data_parallel": layout.data,
        "microbatches": request.microbatches,
        "tokens_per_batch": _tokens(request),
        "rows": [row.as_json() for row in rows],
        "schedules": schedules,
    }


def _tokens(request: Request) -> int:
    samples = request.microbatches * request.args.micro_batch_size * request.layout.data
    return int(samples * request.model.sequence)


def _text(request: Request, rows: list[Row], compared: dict[str, float], args: argparse.Namespace) -> str:
    layout, model = request.layout, request.model
    lines = [
        f"{parameters.total_parameters(model) / 1e6:,.1f}M parameters, "
        f"{parameters.active_parameters(model) / 1e6:,.1f}M active (output weights included, the embedding that is "
        f"looked up not)",
        f"{layout.world} GPUs: TP {layout.tensor}, PP {layout.pipeline}, CP {layout.context}, EP {layout.expert}, "
        f"DP {layout.data}; {request.microbatches} microbatches, {_tokens(request):,} tokens a batch",
        "",
        *_table(
            ["stage", "layers", "M params", "M masters", *(name.replace("_", " ") for name in BYTES), "total GB"],
            [
                [
                    *(str(row.stage), str(row.layers), f"{row.parameters / 1e6:.1f}", f"{row.masters / 1e6:.1f}"),
                    *(f"{getattr(row, name) / 1e9:.2f}" for name in BYTES),
                    f"{row.total / 1e9:.2f}",
                ]
                for row in rows
            ],
        ),
        f"GB of one GPU of each stage, with the activations of {', '.join(str(row.microbatches) for row in rows)} "
        f"microbatches; activations are an estimate, and what the GPU's driver, NCCL and the allocator take is not in "
        f"it",
        "",
        *_speed(request, compared, args),
    ]
    return "\n".join(lines)


def _speed(request: Request, compared: dict[str, float], args: argparse.Namespace) -> list[str]:
    header = ["schedule", "slowdown"]
    cells = [[name, three_decimals(slower)] for name, slower in compared.items()]
    if args.tflops is not None:
        header.append("tokens per day")
        for row, slower in zip(cells, compared.values(), strict=True):
            row.append(f"{speed.tokens_a_day(request.model, request.layout.world, args.tflops, slower):.3g}")
    note = "Slowdown against a pipeline without bubble, if a backward takes twice a forward"
    if args.tflops is not None:
        work = speed.flops_per_token(request.model) / 1e9
        note += f"; {work:.2f} GFLOP a token, {args.tflops:g} TFLOP/s of each GPU while it computes"
    return [*_table(header, cells), note]


def _table(header: list[str], cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    return [
        f"| {' | '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in (header, rule, *cells)
    ]
