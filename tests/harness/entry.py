"""A pretraining entry on Megatron's own `pretrain`, as short as it can be; independent of the plugin's entry."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def datasets(samples: list[int]) -> tuple:
    """Train, valid and test datasets: --data-path's or, with --mock-data, Megatron's mock ones."""
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builds = partial(is_first_or_last_pipeline_stage, None)
    rank_builds = lambda: builds() and mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(kind, samples, rank_builds, config).build()


datasets.is_distributed = True  # every rank calls it: the builder has barriers in it


def batch(iterator: Iterator) -> list[torch.Tensor | None]:
    """This rank's part of the next microbatch; nothing on the stages between the first and the last."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(None):
        return [None] * len(KEYS)
    data: dict = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        raw = next(iterator)
        data = {key: raw[key].cuda() if raw.get(key) is not None else None for key in KEYS}
    data = get_batch_on_this_tp_rank(
        data,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    data = get_batch_on_this_cp_rank(data, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [data.get(key) for key in KEYS]


def loss_function(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum of token losses, number of tokens, and both for the log."""
    mask = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    """Megatron's forward_step_func."""
    tokens, labels, mask, positions, attention = batch(iterator)
    output = model(tokens, positions, attention, labels=labels, loss_mask=mask)
    return output, partial(loss_function, mask)


def embedding_ranks(ranks: list[int]) -> list[int]:
    """The ranks of a pipeline group that hold the word embeddings: first and last."""
    return [ranks[0]] if len(ranks) == 1 else [ranks[0], ranks[-1]]


def main() -> None:
    """Train as sys.argv says."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    training.pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=embedding_ranks)
