"""What an asynchronous schedule can't honour (yet), one row each: the flag, when it applies, and why.

A combination that isn't known to train exactly what was asked for is refused, never tried.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """One refused request.

    Attributes:
        flag: the Megatron flag to name.
        applies: whether the parsed arguments ask for it.
        why: what would go wrong.
        instead: the way out.
    """

    flag: str
    applies: Callable[[Namespace], bool]
    why: str
    instead: str

    def sentence(self) -> str:
        """The message that a user reads."""
        return f"{self.flag} can't be used with --asyncpp-schedule: {self.why}; {self.instead}"


def _given(name: str, default: Any = None) -> Callable[[Namespace], bool]:
    # Megatron deletes some deprecated arguments once it has validated them, hence a default.
    return lambda args: getattr(args, name, default) not in (None, False, default)


def _continues_a_checkpoint(args: Namespace) -> bool:
    marker = "latest_checkpointed_iteration.txt"
    return args.load is not None and not args.finetune and os.path.exists(os.path.join(args.load, marker))


def _shards_weights(args: Namespace) -> bool:
    # Megatron's validation sets the number to the tensor-parallel size if it wasn't given.
    return args.tensor_parallel_num_weight_shards not in (None, args.tensor_model_parallel_size)


def _skips_where_megatron_fails(args: Namespace) -> bool:
    # dummy_train_step in megatron-core 0.19.2 takes every first tensor-parallel rank to have a data iterator.
    return bool(args.iterations_to_skip) and args.pipeline_model_parallel_size > 2


def _gathers_layer_wise(args: Namespace) -> bool:
    return bool(args.overlap_param_gather) and args.optimizer != "adam"


_DROP = "leave the flag out"
_OVER_ITERATIONS = "it keeps state over an iteration, in which forwards of two batches interleave"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("--fp16", _given("fp16"), "loss scaling would have to skip updates on all stages", "use --bf16"),
    Refusal("--fp8-format", _given("fp8"), "its weight caches are made once an iteration", "use --bf16"),
    Refusal("--fp4-format", _given("fp4"), "its weight caches are made once an iteration", "use --bf16"),
    *(
        Refusal(flag, _given(name), "virtual pipeline stages have no asynchronous plan", "use one chunk per stage")
        for flag, name in {
            "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
            "--num-virtual-stages-per-pipeline-rank": "num_virtual_stages_per_pipeline_rank",
            "a pipeline layout with several chunks per stage": "virtual_pipeline_model_parallel_size",
        }.items()
    ),
    *(
        Refusal(flag, _given(name), "its weight buffers have no second version yet", _DROP)
        for flag, name in {
            "--use-megatron-fsdp": "use_megatron_fsdp",
            "--use-torch-fsdp2": "use_torch_fsdp2",
            "--use-precision-aware-optimizer": "use_precision_aware_optimizer",
            "--optimizer-cpu-offload": "optimizer_cpu_offload",
        }.items()
    ),
    Refusal(
        "--overlap-param-gather",
        _gathers_layer_wise,
        "with this optimizer weights are gathered through the gradient buffer, into whichever version is shown",
        "leave the flag out, or use --optimizer adam",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards", _shards_weights, "its weight buffers have no second version yet", _DROP
    ),
    *(
        Refusal(flag, _given(name, default), "a captured graph reads the weights at one fixed address", _DROP)
        for flag, name, default in (
            ("--cuda-graph-impl", "cuda_graph_impl", "none"),
            ("--enable-cuda-graph", "enable_cuda_graph", None),
            ("--external-cuda-graph", "external_cuda_graph", None),
            ("--optimizer-cuda-graph", "optimizer_cuda_graph", None),
        )
    ),
    Refusal(
        "--rerun-mode",
        _given("rerun_mode", "disabled"),
        "an iteration can't be run again once the next one has started",
        "pass --rerun-mode disabled",
    ),
    Refusal(
        "--rampup-batch-size",
        _given("rampup_batch_size"),
        "Megatron 0.19 takes the flag and ignores it",
        "use --step-batch-size-schedule",
    ),
    Refusal(
        "--iterations-to-skip",
        _skips_where_megatron_fails,
        "with more than two stages Megatron reads data on stages that have none, and fails",
        _DROP,
    ),
    Refusal(
        "--load",
        _continues_a_checkpoint,
        "the folder holds a checkpoint, and continuing needs its older weights as well, which aren't saved yet",
        "name an empty folder, or add --finetune to start anew from its weights",
    ),
    Refusal("--use-checkpoint-args", _given("use_checkpoint_args"), "it changes arguments after their checks", _DROP),
    Refusal(
        "--num-experts",
        _given("num_experts"),
        "a router's counters and losses would be those of two batches at once",
        "train a dense model",
    ),
    *(
        Refusal(flag, _given(name), _OVER_ITERATIONS, _DROP)
        for flag, name in {
            "--mtp-num-layers": "mtp_num_layers",
            "--qk-clip": "qk_clip",
            "--dsa-indexer-loss-coeff": "dsa_indexer_loss_coeff",
            "--log-max-attention-logit": "log_max_attention_logit",
            "--delay-wgrad-compute": "delay_wgrad_compute",
            "--defer-embedding-wgrad-compute": "defer_embedding_wgrad_compute",
            "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
            "--fine-grained-activation-offloading": "fine_grained_activation_offloading",
            "--save-activations-interval": "save_activations_interval",
            "--save-dgrads-interval": "save_dgrads_interval",
            "--save-tokens-per-expert-interval": "save_tokens_per_expert_interval",
            "--logits-save-dir": "logits_save_dir",
            "--logits-load-dir": "logits_load_dir",
            "--sft": "sft",
            "--dataloader-inter-document-masking": "dataloader_inter_document_masking",
            "--hybrid-context-parallel": "hybrid_context_parallel",
        }.items()
    ),
    *(
        Refusal(flag, _given(name), "its loop isn't the plain pretraining loop", _DROP)
        for flag, name in {
            "--perform-rl-step": "perform_rl_step",
            "--inprocess-restart": "inprocess_restart",
            "--vision-pretraining": "vision_pretraining",
            "--freeze-all-layers": "freeze_all_layers",
        }.items()
    ),
)
