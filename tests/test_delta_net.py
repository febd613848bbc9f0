"""Megatron's gated delta net as CPU mode runs it: the mathematics, tensor parallelism, and under 2BW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests import delta_net_reference, rows
from tests.fake_world import rank_of
from tests.harness.flags import VOCABULARY, tiny_flags
from tests.harness.results import assert_bitwise
from tests.harness.run import run
from tests.test_moe import ALLTOALL, DP2, DP2_BF16, EP2, FULL_RECOMPUTE, MOE, SEQUENCE_PARALLEL, SHARED_GATE, losses
from tests.test_topologies import CLIP, DISTRIBUTED, Topology, train

DELTA_NET = (
    *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2"),
    *("--linear-conv-kernel-dim", "4", "--linear-key-head-dim", "8", "--linear-value-head-dim", "16"),
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "4"),
)
# Layers 1 and 3 are delta nets, so both stages have one of each kind.
PP2 = "pp2"
ROWS = {PP2: Topology(2, 2, DELTA_NET)}
SLOW_ROWS = {
    "pp4": Topology(4, 4, DELTA_NET),
    "pp2 muon": Topology(2, 2, (*DELTA_NET, *rows.MUON)),
    "pp2 recompute full": Topology(2, 2, (*DELTA_NET, *FULL_RECOMPUTE)),
    "tp2 pp2 sequence parallel": Topology(2, 4, (*DELTA_NET, "--sequence-parallel"), flags={"tensor": 2}),
    "dp2 pp2 distributed bf16": Topology(2, 4, (*DELTA_NET, *DISTRIBUTED), flags=DP2_BF16),
    "pp2, experts, shared expert with gate, norms of queries and keys": Topology(
        2, 2, (*DELTA_NET, *MOE, *SHARED_GATE, *losses("aux_loss"), "--qk-layernorm")
    ),
    "ep2 pp2 alltoall distributed": Topology(
        2, 4, (*DELTA_NET, *EP2, *ALLTOALL, *DISTRIBUTED, *losses("aux_loss")), flags=DP2
    ),
    "ep2 tp2 pp2 sequence parallel": Topology(
        2, 4, (*DELTA_NET, *EP2, *SEQUENCE_PARALLEL, *losses("aux_loss")), flags={"tensor": 2}
    ),
}


@pytest.fixture(autouse=True, scope="module")
def cpu_mode() -> None:
    from megatron_asyncpp.integration import cpu

    cpu.install()


def assert_near(computed: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """In fp32: within 1e-5 of the largest element. The sums are of some hundred terms, of fp32's 6e-8 each."""
    for name, reference in exact.items():
        error = (computed[name].double() - reference).abs().max() / reference.abs().max()
        assert error < 1e-5, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("sequence", [1, 40, 64, 130])
def test_the_chunked_rule_is_the_recurrence(sequence: int) -> None:
    """For less than a chunk of 64, a chunk, and several with a part of one."""
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    generator = torch.Generator().manual_seed(sequence)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, sequence, 3, *shape, dtype=torch.float64, generator=generator)

    unit = torch.nn.functional.normalize
    inputs = {
        "q": unit(normal(8), dim=-1),
        "k": unit(normal(8), dim=-1),
        "v": normal(16),
        "g": -torch.nn.functional.softplus(normal()),
        "beta": normal().sigmoid(),
    }
    weight = normal(16)
    found = []
    for rule, dtype in ((delta_net_reference.recurrence, torch.float64), (torch_chunk_gated_delta_rule, torch.float32)):
        own = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
        result = rule(**own)
        output = result[0] if isinstance(result, tuple) else result
        # A decay does nothing to a sequence of one token: its gradient is zero in both.
        gradients = torch.autograd.grad((output * weight.to(dtype)).sum(), list(own.values()))
        kept = {name: grad for name, grad in zip(own, gradients, strict=True) if sequence > 1 or name != "g"}
        found.append({"output": output.detach(), **kept})
    assert_near(found[1], found[0])


def test_the_layer_is_its_formulas() -> None:
    """The whole of Megatron's layer in fp32, output and the gradient of every weight and of the input."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        transformer_impl="local",
        normalization="RMSNorm",
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    spec = get_gated_delta_net_module_spec(config)
    with rank_of(0, 1):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layer: Any = build_module(spec, config, layer_number=1, pg_collection=groups)
        generator = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(w.shape, generator=generator) / 2 for name, w in layer.named_parameters()}
        x, output_weight = (torch.randn(100, 2, 32, generator=generator) for _ in range(2))
        assert weights.keys() == {
            *("in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight", "out_proj.weight")
        }

        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(weights[name])
        x.requires_grad_()
        output, bias = layer(x, None)
        assert bias is None
        (output * output_weight).sum().backward()
        computed = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad, "out": output}

        exact = {name: weight.double().requires_grad_() for name, weight in weights.items()}
        wide = x.detach().double().requires_grad_()
        output = delta_net_reference.layer(wide, exact, key_heads=2, value_heads=4, key=8, value=16)
        (output * output_weight.double()).sum().backward()
        assert_near(computed, {name: weight.grad for name, weight in exact.items()} | {"x": wide.grad, "out": output})


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ROWS)])
def test_it_is_the_flushed_loop_on_older_weights(name: str) -> None:
    row = (ROWS | SLOW_ROWS)[name]
    done, reference = train(row, "plugin"), train(row, "fixture")
    rows.assert_delayed(done, 4)
    assert sum(norm > CLIP for norm in reference.grad_norms) > rows.ITERATIONS // 2, "clipping wasn't active"
    names = {weight for rank in done.ranks for weight in rank.final}
    assert any("self_attention.conv1d" in weight for weight in names), "there is no delta net"
    assert any("self_attention.linear_qkv" in weight for weight in names), "there is no attention"
    assert_bitwise(done, reference)


def test_a_version_that_is_overwritten_is_seen() -> None:
    """The convolution's backward reads a view of its weight that its forward saved."""
    flags = tiny_flags(2, 4, clip=CLIP, extra=(*DELTA_NET, *rows.TWO_BW, *rows.feedback_flags(1.0)))
    wrong = run(flags, 2, hooks="tests.faults:one_live_buffer")
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(wrong, train(ROWS[PP2], "fixture"))


def unmark_output_norms() -> None:
    """Take the mark for sequence parallelism from the norms of delta nets' outputs."""
    from megatron.core.ssm.gated_delta_net import common

    init = common._GDNBase.__init__

    def without_mark(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.out_norm.weight.sequence_parallel = False

    common._GDNBase.__init__ = without_mark


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint of iteration 8, whole, whatever their layout was."""
    reader = FileSystemReader(folder / "iter_0000008")
    found = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in found.items()
        if name.startswith("decoder.") and isinstance(stored, TensorStorageMetadata)
    }
    load(weights, storage_reader=reader, no_dist=True)
    return weights


@pytest.mark.slow
def test_tensor_and_sequence_parallelism_change_only_the_order_of_sums(tmp_path: Path) -> None:
    """Six iterations from the same checkpoint. The out_norm is the only weight of the layer that TP ranks share."""
    checkpoint = ("--save-interval", "2", "--ckpt-format", "torch_dist")

    def go_on(name: str, tensor: int, *extra: str, hook: Any = None) -> dict[str, torch.Tensor]:
        load = ("--load", str(tmp_path / "whole"), "--ckpt-step", "2") if tensor > 1 else ()
        vocabulary = ("--make-vocab-size-divisible-by", str(VOCABULARY // tensor))  # the same padding
        flags = (*DELTA_NET, *vocabulary, *checkpoint, "--save", str(tmp_path / name), *load, *extra)
        run(tiny_flags(1, 4, iterations=8, tensor=tensor, extra=flags), tensor, "megatron", hooks=hook)
        return saved(tmp_path / name)

    whole = go_on("whole", 1)
    assert sum("out_norm" in name for name in whole) > 0

    def errors(parts: dict[str, torch.Tensor]) -> dict[str, float]:
        assert parts.keys() == whole.keys()
        return {name: float((parts[name] - whole[name]).abs().max()) for name in whole}

    found = errors(go_on("parts", 2, "--sequence-parallel"))
    assert max(found.values()) < 1e-4, found  # the steps are of 5e-3: Adam divides small gradients by small ones
    found = errors(go_on("unmarked", 2, "--sequence-parallel", hook=unmark_output_norms))
    assert max(found.values()) > 1e-3, "a missing mark goes unseen"
