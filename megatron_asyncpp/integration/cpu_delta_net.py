"""CPU mode, gated delta net's part: Megatron's own layer without TransformerEngine's linear layers and fla's kernels.

Megatron has all that is needed: the layer (``megatron.core.ssm.gated_delta_net``), and for ``--deterministic-mode`` a
chunked delta rule in plain torch. But its specs are for TransformerEngine only, and the layer isn't built without fla
(flash-linear-attention), even where it doesn't call it. On a GPU nothing is replaced: Megatron takes fla's kernels.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from megatron_asyncpp.integration.patching import VERSIONS, Patch

_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
_LAYER = "megatron.core.ssm.gated_delta_net.common"


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Each vector of the last dimension, divided by the root of its sum of squares plus ``eps``, as fla's l2norm.

    Args:
        x: [..., head dimension], of any precision; the norm is computed in fp32.
        eps: added to the sum, fla's default.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _is_local(config: Any) -> bool:
    return bool(config.transformer_impl == "local")


def _local_backend(get_backend: Any) -> Any:
    @functools.wraps(get_backend)
    def backend(config: Any) -> Any:
        from megatron.core.models.backends import LocalSpecProvider

        return LocalSpecProvider() if _is_local(config) else get_backend(config)

    return backend


def _local_delta_net(get_spec: Any) -> Any:
    @functools.wraps(get_spec)
    def spec(config: Any, backend: Any = None) -> Any:
        if not _is_local(config):
            return get_spec(config, backend)
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec

        local = LocalSpecProvider()
        return ModuleSpec(
            module=GatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=local.column_parallel_linear(),
                out_norm=local.layer_norm(rms_norm=config.normalization == "RMSNorm"),
                out_proj=local.row_parallel_linear(),
            ),
            metainfo={"fuse_input_layernorm": False},
        )

    return spec


def _local_attention(get_spec: Any) -> Any:
    @functools.wraps(get_spec)
    def spec(config: Any, backend: Any = None) -> Any:
        if not _is_local(config):
            return get_spec(config, backend)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        attention = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        ).submodules.self_attention
        attention.metainfo["fuse_input_layernorm"] = False
        return attention

    return spec


def _in_torch(init: Any) -> Any:
    @functools.wraps(init)
    def init_layer(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        own = copy.copy(config)
        own.deterministic_mode = True
        init(self, own, *args, **kwargs)

    return init_layer


DELTA_NET_PATCHES: tuple[Patch, ...] = (
    Patch(
        f"{_SPECS}:_get_backend_spec_provider",
        _local_backend,
        "the specs of models that mix kinds of attention refuse --transformer-impl local",
        VERSIONS,
    ),
    Patch(
        f"{_SPECS}:get_gated_delta_net_module_spec",
        _local_delta_net,
        "the gated delta net's spec takes TransformerEngine's layer of a norm and a linear: here they are two",
        VERSIONS,
    ),
    Patch(
        f"{_SPECS}:_get_self_attention_module_spec",
        _local_attention,
        "the spec of the full attention between gated delta nets is TransformerEngine's whatever the flags say",
        VERSIONS,
    ),
    Patch(
        f"{_LAYER}:HAVE_FLA",
        lambda original: True,
        "the layer isn't built without fla, although its deterministic path calls nothing of it but l2norm",
        VERSIONS,
    ),
    Patch(
        f"{_LAYER}:l2norm",
        lambda original: l2norm,
        "fla's is a Triton kernel, where it is installed",
        VERSIONS,
    ),
    Patch(
        f"{_LAYER}:_GDNBase.__init__",
        _in_torch,
        "without --deterministic-mode the layer calls fla's Triton kernels: here it always takes the path in torch",
        VERSIONS,
    ),
)
