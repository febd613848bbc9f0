"""Models by name: their sizes, counted on Megatron's own modules and in closed form, and the flag that names them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp import models
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning.flags import Request, read
from megatron_asyncpp.planning.memory import memory
from megatron_asyncpp.planning.parameters import active_parameters, stage_parameters, total_parameters
from tests import rows
from tests.fake_world import rank_of
from tests.harness.flags import tiny_flags
from tests.harness.run import run

# In all and active: as published for the first two (arXiv:2502.02737), as arXiv:2606.30634 says for the others.
SIZES = {
    "smollm2-135m": (134.515e6, 134.515e6),
    "smollm2-360m": (361.821e6, 361.821e6),
    "moe-2b": (2e9, 0.5e9),
    "moe-10b": (10e9, 0.65e9),
}
TRAINING = (
    *("--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-3", "--bf16", "--use-distributed-optimizer"),
    *("--tokenizer-type", "NullTokenizer", "--rerun-mode", "disabled", "--asyncpp-schedule", "2bw"),
    *("--eval-interval", "1000"),
)
# In place of GPUs.
ON_CPU = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--no-persist-layer-norm"),
    *("--no-gradient-accumulation-fusion", "--no-rope-fusion", "--no-masked-softmax-fusion"),
)
FIRST, LAST = 0, -1


def planned(name: str) -> Request:
    model = models.MODELS[name]
    flags = [models.FLAG, name, *model.layout, *TRAINING, "--asyncpp-error-feedback"]
    return read(flags, model.world_size, microbatches=32)


@pytest.fixture(scope="module")
def flags_are_known() -> Iterator[None]:
    """The plugin's flags in Megatron's parser, in CPU mode."""
    from megatron_asyncpp.integration import cpu, megatron, patching

    cpu.install()
    records = [patch for patch in megatron.PATCHES if patch.target.startswith("megatron.training.arguments:")]
    patching.apply(records)
    yield
    patching.undo(records)


def built(flags: list[str], world: int, stages: list[int], held: float = 0.02) -> list[int]:
    """Parameters of the first rank of some stages, in Megatron's modules; at most a share of them in memory."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import arguments
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    environment = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with mock.patch.dict("os.environ", environment), mock.patch("sys.argv", ["pretrain", *flags]):
        args = arguments.parse_args()
        arguments.validate_args(args)
    counts = []
    ranks = range(0, world, world // args.pipeline_model_parallel_size)
    for stage in stages:
        sizes = {
            "tensor_model_parallel_size": args.tensor_model_parallel_size,
            "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        }
        with rank_of(ranks[stage], world, device="meta", **sizes):
            builder = GPTModelBuilder(gpt_config_from_args(args))
            model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
        in_memory = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        assert in_memory < held * counts[-1], "more than norms and routers is in memory"
    return counts


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    request = planned(name)
    total, active = SIZES[name]
    assert total_parameters(request.model) == pytest.approx(total, rel=0.03)
    assert active_parameters(request.model) == pytest.approx(active, rel=0.03)
    if name.startswith("smollm2"):
        assert total_parameters(request.model) == pytest.approx(total, rel=1e-5)
    assert models.MODELS.keys() == SIZES.keys()


def test_a_gpu_has_at_most_200m_masters_of_the_largest() -> None:
    request = planned("moe-10b")
    assert (request.layout.world, request.layout.tensor, request.layout.pipeline, request.layout.expert) == (
        64,
        1,
        8,
        8,
    )
    assert max(row.masters for row in memory(request)) <= 200e6


@pytest.mark.usefixtures("flags_are_known")
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "stages", [[FIRST], [LAST], pytest.param([*range(1, 7)], marks=pytest.mark.slow, id="between")]
)
def test_megatrons_modules_have_as_many_parameters(name: str, stages: list[int]) -> None:
    request, model = planned(name), models.MODELS[name]
    stages = [stage for stage in stages if stage < request.layout.pipeline - 1]
    batch = ("--global-batch-size", str(32 * request.layout.data))
    counts = built([models.FLAG, name, *model.layout, *TRAINING, *ON_CPU, *batch], model.world_size, stages)
    expected = [count.total for count in stage_parameters(request.model, request.layout)]
    assert counts == [expected[stage] for stage in stages]


VARIANTS = {
    "tied, learned positions, LayerNorm, biases, GELU": ("--max-position-embeddings", "64", "--num-query-groups", "4"),
    "bias of queries, keys and values, gate of the output, norms of queries": (
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--add-qkv-bias", "--attention-output-gate", "--qk-layernorm", "--group-query-attention"),
        *("--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
    ),
    "latent attention, experts between dense layers": (
        *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16", "--qk-head-dim", "8"),
        *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "12", "--qk-layernorm", "--rope-type", "rope"),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--num-experts", "4", "--moe-ffn-hidden-size", "48", "--moe-layer-freq", "([0]*1+[1]*3)"),
        *("--moe-shared-expert-intermediate-size", "96", "--expert-model-parallel-size", "2"),
    ),
}


@pytest.mark.usefixtures("flags_are_known")
@pytest.mark.parametrize("name", VARIANTS)
def test_what_other_models_have_is_counted_too(name: str) -> None:
    shape = ("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64")
    size = ("--vocab-size", "300", "--make-vocab-size-divisible-by", "8", "--pipeline-model-parallel-size", "2")
    flags = [*shape, *size, "--max-position-embeddings", "64", *VARIANTS[name], *TRAINING]
    request = read(flags, 4, microbatches=4)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # It has no parameters; the local one doesn't take the two sizes of latent attention's heads.
    without = mock.patch.object(DotProductAttention, "__init__", lambda self, *_, **__: torch.nn.Module.__init__(self))
    with without:
        counts = built([*flags, *ON_CPU, "--global-batch-size", "8"], 4, [FIRST, LAST], held=1.0)
    assert counts == [count.total for count in stage_parameters(request.model, request.layout)]


def test_the_flag_sets_a_model_and_an_explicit_flag_wins() -> None:
    """Sizes that would take minutes are given otherwise; what isn't given is the model's."""
    smaller = ("--num-layers", "4", "--hidden-size", "36", "--vocab-size=64", "--num-experts", "4")
    words = [*smaller, models.FLAG, "smollm2-135m"]
    expanded = models.expanded(words)
    assert expanded == [*models.MODELS["smollm2-135m"].flags, *words]
    request = read([*expanded, "--pipeline-model-parallel-size", "2"], 2, 4)
    assert (len(request.model.layers), request.model.hidden) == (4, 36)
    assert (request.model.vocabulary, request.model.ffn, request.model.tied) == (64, 1536, True)
    told = models.described(words)
    assert told is not None
    assert told.startswith("--asyncpp-model smollm2-135m sets --ffn-hidden-size 1536 ")
    assert told.endswith("; given otherwise: --num-layers 4 --hidden-size 36 --vocab-size=64")
    assert models.expanded(list(smaller)) == list(smaller)
    assert models.described(list(smaller)) is None


@pytest.mark.usefixtures("flags_are_known")
def test_megatron_parses_it(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.training import arguments

    argv = ["pretrain", "--num-layers", "4", models.FLAG, "moe-10b"]
    with mock.patch("sys.argv", argv):
        args = arguments.parse_args()
        assert sys.argv == argv
    assert (args.num_layers, args.hidden_size, args.num_experts, args.moe_router_topk) == (4, 1024, 512, 10)
    assert (args.experimental_attention_variant, args.linear_attention_freq) == ("gated_delta_net", 4)
    assert "given otherwise: --num-layers 4" in capsys.readouterr().out


@pytest.mark.usefixtures("flags_are_known")
@pytest.mark.parametrize("words", [[models.FLAG, "gpt-5"], [f"{models.FLAG}=gpt-5"]])
def test_an_unknown_model_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.training import arguments

    with mock.patch("sys.argv", ["pretrain", *words]), pytest.raises(SystemExit) as leaving:
        arguments.parse_args()
    assert leaving.value.code == 2
    told = f"megatron_asyncpp: {models.FLAG} gpt-5 is no model that is known: take one of {', '.join(SIZES)}\n"
    assert capsys.readouterr().err == told


def test_a_model_without_a_name_is_one_sentence() -> None:
    for words in ([models.FLAG], [models.FLAG, "--bf16"], [f"{models.FLAG}="]):
        with pytest.raises(AsyncPPError, match="--asyncpp-model names no model: take one of"):
            models.expanded(words)


@pytest.mark.parametrize("name", SIZES)
def test_flags_are_for_a_shell(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["flags", name]) == 0
    out, err = capsys.readouterr()
    assert out.split() == list(models.MODELS[name].flags)
    assert "embedding that is looked up not" in err


# Few and small layers of each kind; the rest of the model is the preset's, and so is the vocabulary under a sequence.
SMALLER = (
    *("--num-layers", "4", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4"),
    *("--kv-channels", "8", "--num-query-groups", "2", "--vocab-size", "128", "--seq-length", "32"),
)
SMALLER_MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-shared-expert-intermediate-size", "32", "--linear-key-head-dim", "8", "--linear-value-head-dim", "8"),
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "2"),
)


@pytest.mark.parametrize(
    "name", ["moe-10b", *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n != "moe-10b")]
)
def test_a_smaller_one_trains_asynchronously(name: str) -> None:
    """By the flag alone, in Megatron's loop; without it the tiny model would have neither experts nor delta nets."""
    extra = [models.FLAG, name, *SMALLER, *(SMALLER_MOE if "moe" in name else ())]
    done = run(tiny_flags(2, 4, extra=[*extra, *rows.TWO_BW, *rows.feedback_flags(1.0)]), 2)
    rows.assert_delayed(done, 4)
    names = set(done.ranks[0].final)
    assert any("local_experts" in weight for weight in names) == ("moe" in name)
    assert any("conv1d" in weight for weight in names) == (name == "moe-10b")
    assert f"megatron_asyncpp: {models.FLAG} {name} sets " in done.ranks[0].stdout
    assert "given otherwise: --num-layers 4" in done.ranks[0].stdout
    assert not any(models.FLAG in rank.stdout.partition("arguments ---")[0] for rank in done.ranks[1:])
