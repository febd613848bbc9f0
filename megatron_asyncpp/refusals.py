"""What an asynchronous schedule can't honour (yet), one row each: the flag, when it applies, and why.

A combination that isn't known to train exactly what was asked for is refused, never tried.
"""

from __future__ import annotations

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


def _shards_weights(args: Namespace) -> bool:
    # Megatron's validation sets the number to the tensor-parallel size if it wasn't given.
    return args.tensor_parallel_num_weight_shards not in (None, args.tensor_model_parallel_size)


def _skips_where_megatron_fails(args: Namespace) -> bool:
    # dummy_train_step in megatron-core 0.19.2 takes every first tensor-parallel rank to have a data iterator.
    return bool(args.iterations_to_skip) and args.pipeline_model_parallel_size > 2


def _saves_in_another_format(args: Namespace) -> bool:
    return getattr(args, "ckpt_format", "torch_dist") not in ("torch", "torch_dist")


def _wants_no_other_keys(args: Namespace) -> bool:
    return getattr(args, "dist_ckpt_strictness", None) in ("raise_unexpected", "raise_all")


def _leaves_delta_norms_unsummed(args: Namespace) -> bool:
    # Each tensor-parallel rank has other heads, and megatron-core 0.19.2 sums marked gradients with the flag only.
    variant = getattr(args, "experimental_attention_variant", None)
    return variant == "gated_delta_net" and args.tensor_model_parallel_size > 1 and not args.sequence_parallel


def _gathers_layer_wise(args: Namespace) -> bool:
    return bool(args.overlap_param_gather) and args.optimizer != "adam"


_DROP = "leave the flag out"
_ONE_BATCH_A_CALL = "it takes each call of the schedule to run the forwards of one batch, and of no other"
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
    Refusal("--use-checkpoint-args", _given("use_checkpoint_args"), "it changes arguments after their checks", _DROP),
    *(
        Refusal(flag, _given(name), _ONE_BATCH_A_CALL, _DROP)
        for flag, name in {
            "--moe-expert-rank-capacity-factor": "moe_expert_rank_capacity_factor",
            "--moe-paged-stash": "moe_paged_stash",
            "--moe-enable-routing-replay": "moe_enable_routing_replay",
            "--moe-routing-trace-path": "moe_routing_trace_path",
        }.items()
    ),
    Refusal(
        "--experimental-attention-variant gated_delta_net",
        _leaves_delta_norms_unsummed,
        "under tensor parallelism Megatron lets the norm of its output differ between ranks",
        "add --sequence-parallel, with which it sums that gradient",
    ),
    *(
        Refusal(flag, _given(name), "experts' weights are views of a tensor that has no second version yet", _DROP)
        for flag, name in {
            "--moe-single-grouped-weight": "moe_single_grouped_weight",
            "--moe-single-grouped-bias": "moe_single_grouped_bias",
        }.items()
    ),
    Refusal(
        "--transformer-impl inference_optimized",
        lambda args: args.transformer_impl == "inference_optimized",
        "its buffers alias the experts' parameters, and would stay at an older version",
        "use another --transformer-impl",
    ),
    Refusal(
        "--moe-flex-dispatcher-backend ncclep",
        lambda args: args.moe_flex_dispatcher_backend == "ncclep",
        "it needs --moe-expert-rank-capacity-factor, which is refused",
        "use another backend",
    ),
    Refusal(
        "--ckpt-format",
        _saves_in_another_format,
        "the stale weights would be left out of the checkpoint",
        "use torch_dist or torch",
    ),
    Refusal(
        "--ckpt-assume-constant-structure",
        _given("ckpt_assume_constant_structure"),
        "whether stale weights belong into a checkpoint changes during a run",
        _DROP,
    ),
    Refusal(
        "--non-persistent-ckpt-type",
        lambda args: getattr(args, "non_persistent_ckpt_type", None) not in (None, "global"),
        "the stale weights are read from a checkpoint that all ranks see",
        "use global",
    ),
    Refusal(
        "--dist-ckpt-strictness",
        _wants_no_other_keys,
        "the stale weights are read apart from Megatron's own keys, to which they are unexpected",
        "use another value",
    ),
    Refusal(
        "--ckpt-convert-format",
        _given("ckpt_convert_format"),
        "the stale weights would be left out of the new checkpoint",
        "leave out --asyncpp-schedule too, and go on from the newest weights",
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
            "--overlap-dispatch-backward-with-experts-wgrad": "overlap_dispatch_backward_with_experts_wgrad",
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
