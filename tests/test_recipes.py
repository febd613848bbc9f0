"""The SLURM recipes: their command lines through Megatron and the plugin at full size, their refusals, their twins."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from megatron_asyncpp.models import MODELS
from tests import rows
from tests.harness.flags import flag
from tests.harness.run import run
from tests.recipes import (
    RECIPES,
    SCHEDULES,
    TWIN_BATCH,
    TWIN_RANKS,
    call,
    command,
    flags_here,
    header,
    inputs,
    twin,
    world_size,
)
from tests.test_models import built, flags_are_known

__all__ = ["flags_are_known"]

TOKENS = {"smollm2-135m": 20 * 134.515e6, "smollm2-360m": 20 * 361.821e6, "moe-2b": 50e9, "moe-10b": 200e9}


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_there_is_a_recipe_for_each_model() -> None:
    assert RECIPES.keys() == MODELS.keys() == TOKENS.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_what_slurm_is_asked_for(name: str) -> None:
    """Requeued after a failed node, the ranks signalled in time to save, the log kept."""
    asked = header(name)
    assert asked["job-name"] == name
    assert {"requeue", "exclusive"} <= asked.keys()
    assert (asked["open-mode"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("append", "8", "8")
    assert asked["signal"] == "TERM@600", "to the ranks, not to the shell, which would be B:"


@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_recipe(name: str, tmp_path: Path) -> None:
    words = command(name, tmp_path)
    assert words[:5] == ["python", "-m", "megatron_asyncpp", "run", "pretrain_gpt"]
    expected = {"--clip-grad": 1.0, "--weight-decay": 0.1, "--lr-warmup-fraction": 0.1}
    assert {flag: float(value(words, flag)) for flag in expected} == expected
    assert value(words, "--lr-decay-style") == "cosine"
    assert float(value(words, "--min-lr")) == pytest.approx(0.1 * float(value(words, "--lr")))
    per_batch = int(value(words, "--global-batch-size")) * int(value(words, "--seq-length"))
    assert int(value(words, "--train-iters")) * per_batch == pytest.approx(TOKENS[name], rel=1e-4)
    assert value(words, "--asyncpp-model") == name


@pytest.mark.usefixtures("flags_are_known")
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RECIPES)
def test_megatron_and_the_plugin_accept_it_at_full_size(
    name: str, schedule: str, optimizer: str, tmp_path: Path
) -> None:
    words = command(name, tmp_path, SCHEDULE=schedule, OPTIMIZER=optimizer)
    asked = " ".join(word for word in words if word.startswith("--asyncpp") or word in ("1f1b", "2bw"))
    assert asked.startswith(" ".join(SCHEDULES[schedule]))
    assert ("--asyncpp-error-feedback" in words) == (schedule == "2bw-ef")
    assert value(words, "--optimizer") == optimizer
    assert built(flags_here(words), world_size(name), []) == []


@pytest.mark.usefixtures("flags_are_known")
@pytest.mark.parametrize("name", RECIPES)
def test_a_rank_of_every_stage_can_be_built(name: str, tmp_path: Path) -> None:
    words = command(name, tmp_path)
    stages = int(value(words, "--pipeline-model-parallel-size"))
    counts = built(flags_here(words), world_size(name), [*range(stages)])
    assert len(counts) == stages
    assert max(counts) < 2 * min(counts), "stages of very different size"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SCHEDULE": "3bw"}, "SCHEDULE 3bw is none: take sync, 2bw or 2bw-ef"),
        ({"OPTIMIZER": "sgd"}, "OPTIMIZER sgd is none: take muon or adam"),
        ({"DATA": ""}, "DATA is not set: give the prefix"),
        ({"DATA": "/nowhere/corpus"}, "DATA names /nowhere/corpus, but there is no /nowhere/corpus.bin"),
        ({"TOKENIZER": ""}, "TOKENIZER is not set: give the folder"),
        ({"TOKENIZER": "/nowhere/tokenizer"}, "TOKENIZER names /nowhere/tokenizer, which isn't there"),
        ({"RUN": "/proc/run"}, "/proc/run can't be written by "),
        ({"DRY_RUN": ""}, "this is no Slurm job: call it with sbatch, or with DRY_RUN=1"),
        ({"SLURM_SUBMIT_DIR": "/"}, "/ is not the project's folder: call sbatch in there"),
    ],
    ids=str,
)
def test_a_wrong_call_is_refused_in_one_sentence(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    done = call("moe-2b", {**inputs(tmp_path), **changed})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"moe-2b.sbatch: {message}")
    assert len(done.stderr.splitlines()) == 1


STAND_INS = {
    "srun": 'printf "%s\\n" "$@" >"$LOG"; env >>"$LOG"; mkdir -p "$RUN/checkpoints"; '
    'echo "$REACHED" >"$RUN/checkpoints/latest_checkpointed_iteration.txt"; exit "$CODE"',
    "scontrol": 'if [[ $1 == show ]]; then printf "node%s\\n" 7 8; else echo "$@" >>"$LOG.scontrol"; fi',
    "ip": 'echo "default via 10.0.0.1 dev ib0 proto static"',
}


@pytest.mark.parametrize(
    ("reached", "code", "requeued"), [("500", 0, True), ("100000", 0, False), ("500", 1, False)], ids=str
)
def test_it_goes_on_until_all_iterations_are_done(reached: str, code: int, requeued: bool, tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands. What failed by itself isn't started again, by us."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    log = tmp_path / "log"
    environment = {
        **inputs(tmp_path),
        **{"DRY_RUN": "", "SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "node[7-8]", "SRUN_FLAGS": "--one --two"},
        **{"LOG": str(log), "REACHED": reached, "CODE": str(code)},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    done = call("moe-2b", environment)
    assert done.returncode == code, done.stderr
    told = log.read_text().splitlines()
    assert told[told.index("--one") + 1] == "--two"
    assert told[told.index("task") + 1 :][:4] == ["python", "-m", "megatron_asyncpp", "run"]
    for line in ("MASTER_ADDR=node7", "MASTER_PORT=20007", "GLOO_SOCKET_IFNAME=ib0", "CUDA_DEVICE_MAX_CONNECTIONS=1"):
        assert line in told
    scontrol = Path(f"{log}.scontrol")
    assert (scontrol.read_text() if scontrol.exists() else "") == ("requeue 20007\n" if requeued else "")


@pytest.mark.parametrize(
    "name", [name if name == "moe-2b" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_small_twin_trains(name: str, tmp_path: Path) -> None:
    """Stages, layout, optimizer and all flags but sizes are the recipe's; 2BW with Error Feedback."""
    flags = twin(name, command(name, tmp_path))
    done = run(flags, TWIN_RANKS, timeout=580)
    stages = int(flag(flags, "--pipeline-model-parallel-size", ""))
    rows.assert_delayed(done, TWIN_BATCH * stages // TWIN_RANKS, iterations=10)
    assert len(done.losses) == 10
    assert all(loss is not None and math.isfinite(loss) for loss in done.losses)
    print(name, *(f"{loss:.4f}" for loss in done.losses))
