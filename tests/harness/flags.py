"""Megatron flags of a model that trains in a second, and the random corpus it trains on."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

VOCABULARY = 128
DOCUMENTS = 512
RUN = "{run}"  # run() puts the run's own folder here


def tiny_flags(
    pipeline: int = 1,
    microbatches: int = 4,
    iterations: int = 12,
    *,
    layers: int = 4,
    hidden: int = 32,
    sequence: int = 32,
    micro_batch_size: int = 1,
    data_parallel: int = 1,
    tensor: int = 1,
    clip: float = 0.0,
    lr: float = 5e-3,
    bf16: bool = False,
    tied: bool = False,
    eval_interval: int = 1000,
    eval_iters: int = 0,
    ramp_up: Sequence[tuple[int, int]] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    """Flags of a tiny SwiGLU/RMSNorm GPT on the harness's corpus. A flag in `extra` overrides the same flag here.

    `ramp_up` lists (microbatches, iterations) in the order they are to come, in place of one number of each.
    """
    flags: dict[str, object] = {
        "--pipeline-model-parallel-size": pipeline,
        "--tensor-model-parallel-size": tensor,
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--ffn-hidden-size": 2 * hidden,
        "--num-attention-heads": 4,
        "--seq-length": sequence,
        "--max-position-embeddings": sequence,
        "--position-embedding-type": "rope",
        "--normalization": "RMSNorm",
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--micro-batch-size": micro_batch_size,
        "--global-batch-size": microbatches * micro_batch_size * data_parallel,
        "--train-iters": iterations,
        "--eval-interval": eval_interval,
        "--eval-iters": eval_iters,
        "--optimizer": "adam",
        "--lr": lr,
        "--min-lr": lr / 10,
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": 2,
        "--lr-warmup-init": lr / 2,  # not 0, else V(1) = V(0) and a missing delay of batch 1 couldn't be seen
        "--weight-decay": 0.1,
        "--clip-grad": clip,
        "--init-method-std": 0.05,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": VOCABULARY,
        "--make-vocab-size-divisible-by": VOCABULARY,
        "--data-path": f"{RUN}/corpus",
        "--data-cache-path": f"{RUN}/cache",
        "--split": "90,10,0",
        "--num-workers": 0,
        "--seed": 1234,
        "--log-interval": 1,
        "--rerun-mode": "disabled",
        # what a machine without a GPU needs
        "--distributed-backend": "gloo",
        "--transformer-impl": "local",
    }
    if ramp_up:
        for name in ("--global-batch-size", "--train-iters", "--lr-warmup-iters"):
            del flags[name]
        consumed, thresholds = 0, []
        for count, repeated in ramp_up:
            batch = count * micro_batch_size * data_parallel
            thresholds.append(f"{consumed * sequence}:{batch}")  # Megatron counts in tokens
            consumed += batch * repeated
        flags["--step-batch-size-schedule"] = " ".join(thresholds)
        flags["--train-samples"] = consumed
        flags["--lr-warmup-samples"] = consumed // 10
    switches = ["--swiglu", "--disable-bias-linear", "--deterministic-mode", "--no-persist-layer-norm"]
    switches += ["--no-gradient-accumulation-fusion", "--no-rope-fusion", "--no-masked-softmax-fusion"]
    switches += [] if tied else ["--untie-embeddings-and-output-weights"]
    switches += ["--bf16"] if bf16 else []
    return [text for pair in flags.items() for text in map(str, pair)] + switches + list(extra)


def flag(flags: Sequence[str], name: str, default: str) -> str:
    """The value a flag has on a command line; the last one counts."""
    values = [flags[i + 1] for i, text in enumerate(flags[:-1]) if text == name]
    return values[-1] if values else default


def write_corpus(prefix: Path, sequence: int) -> None:
    """Write random documents as Megatron's .bin/.idx.

    Each document is one sequence long, so each sample is one document, and its first two tokens tell which: document d
    starts with d // 128 and d % 128. Random tokens make any two batches differ, so a mixed-up batch can't go unseen.
    """
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, (DOCUMENTS, sequence), dtype=np.int32)
    tokens[:, 0], tokens[:, 1] = np.divmod(np.arange(DOCUMENTS), VOCABULARY)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, DOCUMENTS, DOCUMENTS + 1))  # 4: int32
        file.write(np.full(DOCUMENTS, sequence, np.int32).tobytes())
        file.write((np.arange(DOCUMENTS, dtype=np.int64) * sequence * 4).tobytes())
        file.write(np.arange(DOCUMENTS + 1, dtype=np.int64).tobytes())
