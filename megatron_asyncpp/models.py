"""Models by name: Megatron's flags of their architecture, and nothing of data, batch size or optimizer.

``smollm2-135m`` and ``smollm2-360m`` are the published models (arXiv:2502.02737), and what arXiv:2606.30634 trains. The
first has the context of that study, 1024; the second that of its own pretraining, 2048: give ``--seq-length 1024`` to
compare with the study. Neither context changes a weight.

``moe-2b`` and ``moe-10b`` stand for that paper's mixtures of experts, of which it publishes the sizes, the context,
and of the second that it has 512 experts, 10 for each token, and mixes full attention with gated delta nets. Widths and
numbers of layers are ours, and so are routers and vocabulary: 131072 tokens, which need no padding for any tensor
parallelism. Embeddings and output weights are two, since one tensor would tie the first stage to the last. 16 and 32
layers make equal stages, of four layers in the layouts below: three delta nets and a full attention in ``moe-10b``.

Active parameters are those that a token is multiplied with: of the experts those it is sent to, of the rest all but
the input embedding, which is looked up; the output weights count.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_asyncpp.errors import AsyncPPError

FLAG = "--asyncpp-model"

_TRANSFORMER = (
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--make-vocab-size-divisible-by", "128"),
)
_SMOLLM2 = (*_TRANSFORMER, "--norm-epsilon", "1e-5", "--rotary-base", "100000", "--vocab-size", "49152")
_MOE = (
    *(*_TRANSFORMER, "--untie-embeddings-and-output-weights", "--qk-layernorm", "--norm-epsilon", "1e-6"),
    *("--rotary-base", "1000000", "--vocab-size", "131072", "--seq-length", "8192"),
    *("--max-position-embeddings", "8192", "--moe-router-load-balancing-type", "aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2", "--moe-router-dtype", "fp32"),
)


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        flags: of its architecture.
        world_size: ranks of the layout that it is meant for.
        layout: flags of that layout.
    """

    flags: tuple[str, ...]
    world_size: int
    layout: tuple[str, ...]


MODELS = {
    "smollm2-135m": Model(
        (
            *("--num-layers", "30", "--hidden-size", "576", "--ffn-hidden-size", "1536"),
            *("--num-attention-heads", "9", "--group-query-attention", "--num-query-groups", "3"),
            *("--seq-length", "1024", "--max-position-embeddings", "1024", *_SMOLLM2),
        ),
        4,
        ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Et*7|t*8|t*8|t*7L"),
    ),
    "smollm2-360m": Model(
        (
            *("--num-layers", "32", "--hidden-size", "960", "--ffn-hidden-size", "2560"),
            *("--num-attention-heads", "15", "--group-query-attention", "--num-query-groups", "5"),
            *("--seq-length", "2048", "--max-position-embeddings", "2048", *_SMOLLM2),
        ),
        4,
        ("--pipeline-model-parallel-size", "4"),
    ),
    "moe-2b": Model(
        (
            *("--num-layers", "16", "--hidden-size", "1024", "--ffn-hidden-size", "4096"),
            *("--num-attention-heads", "16", "--kv-channels", "128"),
            *("--group-query-attention", "--num-query-groups", "8"),
            *("--num-experts", "64", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "512"),
            *("--moe-shared-expert-intermediate-size", "1024", *_MOE),
        ),
        16,
        ("--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "4"),
    ),
    "moe-10b": Model(
        (
            *("--num-layers", "32", "--hidden-size", "1024", "--ffn-hidden-size", "4096"),
            *("--num-attention-heads", "16", "--kv-channels", "128"),
            *("--group-query-attention", "--num-query-groups", "2"),
            *("--num-experts", "512", "--moe-router-topk", "10", "--moe-ffn-hidden-size", "192"),
            *("--moe-shared-expert-intermediate-size", "192", "--moe-shared-expert-gate"),
            *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "4"),
            *("--linear-conv-kernel-dim", "4", "--linear-key-head-dim", "128", "--linear-value-head-dim", "128"),
            *("--linear-num-key-heads", "16", "--linear-num-value-heads", "16", *_MOE),
        ),
        64,
        ("--pipeline-model-parallel-size", "8", "--expert-model-parallel-size", "8"),
    ),
}


def model(name: str, named_by: str = FLAG) -> Model:
    """The model of that name.

    Args:
        name: a key of MODELS.
        named_by: the flag or command that has the name, for the error's text.

    Raises:
        AsyncPPError: there is none.
    """
    if name not in MODELS:
        raise AsyncPPError(f"{named_by} {name} is no model that is known: take one of {', '.join(MODELS)}")
    return MODELS[name]


def grouped(flags: tuple[str, ...] | list[str]) -> list[list[str]]:
    """Each flag with its values."""
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def named(argv: list[str]) -> str | None:
    """The model that a command line names, or None; the last one counts.

    Raises:
        AsyncPPError: the flag has no value.
    """
    name = None
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            name = value if equals else following
            if not name or name.startswith("--"):
                raise AsyncPPError(f"{FLAG} names no model: take one of {', '.join(MODELS)}")
    return name


def expanded(argv: list[str]) -> list[str]:
    """A command line with the flags of the model that it names put first, so that a flag it gives itself wins.

    Raises:
        AsyncPPError: there is no model of that name.
    """
    name = named(argv)
    return argv if name is None else [*model(name).flags, *argv]


def described(argv: list[str]) -> str | None:
    """What the model that a command line names sets there, and what the command line sets otherwise; None without one.

    Raises:
        AsyncPPError: there is no model of that name.
    """
    name = named(argv)
    if name is None:
        return None
    given = {flag.partition("=")[0]: [flag, *values] for flag, *values in grouped(argv)}
    ours = [" ".join(words) for words in grouped(model(name).flags) if words[0] not in given]
    theirs = [" ".join(given[words[0]]) for words in grouped(model(name).flags) if words[0] in given]
    kept = f"; given otherwise: {' '.join(theirs)}" if theirs else ""
    return f"{FLAG} {name} sets {' '.join(ours)}{kept}"
