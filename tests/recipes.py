"""The SLURM recipes as tests read them: their commands, what stands for a GPU in these, and their small twins."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from megatron_asyncpp.integration.cpu import FLAGS
from megatron_asyncpp.models import grouped
from tests.harness.flags import RUN, VOCABULARY
from tests.harness.forkserver import ROOT

SLURM = ROOT / "scripts" / "slurm"
RECIPES = {path.stem: path for path in sorted(SLURM.glob("*.sbatch"))}
SCHEDULES = {
    "sync": ["--asyncpp-schedule", "1f1b"],
    "2bw": ["--asyncpp-schedule", "2bw"],
    "2bw-ef": ["--asyncpp-schedule", "2bw", "--asyncpp-error-feedback"],
}

# All that a recipe has and this machine hasn't. The rest of its command is taken as it is.
ABSENT = {
    "--moe-grouped-gemm": "its kernels are Transformer Engine's: experts are computed one after the other",
    "--tokenizer-model": "it takes transformers and a download: a NullTokenizer of the same vocabulary",
    "--tensorboard-dir": "tensorboard is an extra",
}
IN_PLACE = [
    *("--tokenizer-type", "NullTokenizer"),
    # Layers of Megatron's own in place of Transformer Engine's, gloo in place of NCCL, torch in place of fla.
    *(word for flag in FLAGS for word in (flag.name, flag.value) if word is not None),
]

TWIN_RANKS, TWIN_BATCH = 4, 8
_TINY = {
    **{"--seq-length": 32, "--max-position-embeddings": 32, "--vocab-size": VOCABULARY, "--train-iters": 10},
    **{"--micro-batch-size": 1, "--global-batch-size": TWIN_BATCH, "--lr": 1e-2, "--min-lr": 1e-3, "--num-workers": 0},
    **{"--data-path": f"{RUN}/corpus", "--data-cache-path": f"{RUN}/cache", "--split": "90,10,0"},
    **{"--save": f"{RUN}/saved", "--load": f"{RUN}/saved", "--log-interval": 1, "--eval-iters": 0, "--seed": 1234},
}
_EXPERTS = {
    **{"--pipeline-model-parallel-size": 2, "--expert-model-parallel-size": 2, "--num-layers": 4},
    **{"--hidden-size": 32, "--num-attention-heads": 4, "--num-query-groups": 2, "--kv-channels": 8},
    **{"--num-experts": 4, "--moe-router-topk": 2, "--moe-ffn-hidden-size": 16},
    "--moe-shared-expert-intermediate-size": 16,
}
# Sizes that make a model of seconds of each; layout, layers and heads of the dense ones stay.
TWINS: dict[str, dict[str, object]] = {
    "smollm2-135m": {"--hidden-size": 72, "--ffn-hidden-size": 96},
    "smollm2-360m": {"--hidden-size": 120, "--ffn-hidden-size": 96},
    "moe-2b": _EXPERTS,
    "moe-10b": {
        **_EXPERTS,
        **{"--linear-key-head-dim": 8, "--linear-value-head-dim": 8},
        **{"--linear-num-key-heads": 4, "--linear-num-value-heads": 4},
    },
}


def inputs(folder: Path) -> dict[str, str]:
    """The environment of a recipe, with an empty corpus and tokenizer that are only there."""
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        (folder / name).touch()
    (folder / "tokenizer").mkdir(exist_ok=True)
    return {
        "DATA": f"0.7 {folder}/a 0.3 {folder}/b",
        "TOKENIZER": str(folder / "tokenizer"),
        "RUN": str(folder / "the run"),
        "DRY_RUN": "1",
    }


def call(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Call a recipe outside of Slurm."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return subprocess.run(
        [RECIPES[name]], env={**clean, **environment}, capture_output=True, text=True, timeout=60, cwd="/"
    )


def command(name: str, folder: Path, **environment: str) -> list[str]:
    """What each task of a recipe would run, a word an element."""
    done = call(name, {**inputs(folder), **environment})
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def flags_here(words: list[str]) -> list[str]:
    """The flags of a recipe's command, as this machine can take them."""
    script = words.index("pretrain_gpt")
    kept = [word for group in grouped(words[script + 1 :]) if group[0] not in ABSENT for word in group]
    return [*kept, *IN_PLACE]


def twin(name: str, words: list[str]) -> list[str]:
    """The flags of a recipe's small twin: the same, and then other sizes, which win."""
    sizes = {**_TINY, **TWINS[name]}
    return [*flags_here(words), *(str(word) for pair in sizes.items() for word in pair)]


def header(name: str) -> dict[str, str]:
    """What a recipe asks Slurm for."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", RECIPES[name].read_text(), re.MULTILINE))


def world_size(name: str) -> int:
    """The ranks that a recipe starts."""
    return int(header(name)["nodes"]) * int(header(name)["ntasks-per-node"])
