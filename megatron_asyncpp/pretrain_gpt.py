"""A pretraining entry for GPT models on ``megatron.training``, for those without a Megatron-LM checkout.

Dense and mixture-of-experts models, mock data or ``.bin``/``.idx`` files, with Megatron's own flags. It plays the part
of the script ``pretrain_gpt.py`` that a checkout has and the megatron-core wheel hasn't.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_asyncpp.errors import AsyncPPError, leave

# What get_batch_on_this_tp_rank wants to find on the first tensor-parallel rank; a dataset leaves some out.
_BATCH_KEYS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"),
)


def get_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch, as this rank's part of it; empty on the stages between the first and the last."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in _BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss of one microbatch.

    Args:
        loss_mask: [micro batch, sequence], 1 for every token that counts.
        output: [micro batch, sequence], the loss of each token.

    Returns:
        The sum of the losses, the number of tokens that count (int), and both as the report for the log.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for what, rejected in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one microbatch through this stage; returns its output and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets(train_val_test_num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The training, validation and test datasets of so many samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def is_built_on_rank() -> bool:
        first_tp_rank = parallel_state.get_tensor_model_parallel_rank() == 0
        return first_tp_rank and is_first_or_last_pipeline_stage(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, is_built_on_rank, config).build()


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold the word embeddings: the first, and the last if they are tied."""
    tied = not get_args().untie_embeddings_and_output_weights
    return sorted({pp_ranks[0], pp_ranks[-1]}) if tied else [pp_ranks[0]]


# Megatron flags that its own script honours and this entry doesn't.
_NOT_SERVED = (
    *("sft", "fim_data", "dataloader_inter_document_masking", "hybrid_context_parallel", "hybrid_layer_pattern"),
    *("logits_load_dir", "mtp_num_layers", "check_for_spiky_loss", "per_dataset_sequences_path", "modelopt_enabled"),
)


def main() -> None:
    """Parse Megatron's flags from the command line, and pretrain."""
    # Megatron passes a dataset provider without this mark on the first tensor-parallel rank only.
    datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    for name in _NOT_SERVED:
        if getattr(args, name, None) not in (None, False):
            flag = "--" + name.replace("_", "-")
            leave(AsyncPPError(f"the entry pretrain_gpt of this package doesn't serve {flag}: run Megatron-LM's own"))
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=get_embedding_ranks)


if __name__ == "__main__":
    main()
