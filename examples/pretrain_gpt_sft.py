"""Pretrain or fine-tune a GPT on packed sequences with Megatron-LM. Knows nothing of any plugin.

The usual four functions (get_batch, loss_func, forward_step, model_provider) on the batch contract
of Megatron's --sft: tokens, labels, loss_mask, position_ids [1, seq_length], cu_seqlens [1, n] and
max_seqlen [1]. Without other data it trains on made-up sequences that count upwards.

    torchrun --nproc-per-node 2 examples/pretrain_gpt_sft.py --sft \
        --no-create-attention-mask-in-dataloader --tokenizer-type NullTokenizer --vocab-size 128 …
"""

from functools import partial

import torch
from megatron.core import mpu, utils
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_timers, pretrain, print_rank_0, training
from megatron.training.arguments import core_transformer_config_from_args

TOKEN_KEYS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}
BATCH_KEYS = (*TOKEN_KEYS, "cu_seqlens", "max_seqlen")
# Megatron 0.17 does not count the FLOPs of packed sequences.
count_flops = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)


def receive_batch(batch):
    """Give every tensor-parallel rank the batch that the first of them read."""
    args = get_args()
    if args.tensor_model_parallel_size == 1:
        return batch
    source = mpu.get_tensor_model_parallel_src_rank()
    group = mpu.get_tensor_model_parallel_group()
    length = torch.tensor([batch["cu_seqlens"].numel() if batch else 0], device="cuda")
    torch.distributed.broadcast(length, source, group=group)
    if batch is None:
        shape = (args.micro_batch_size, args.seq_length)
        batch = {k: torch.empty(shape, dtype=d, device="cuda") for k, d in TOKEN_KEYS.items()}
        batch["cu_seqlens"] = torch.empty((1, int(length)), dtype=torch.int32, device="cuda")
        batch["max_seqlen"] = torch.empty(1, dtype=torch.int32, device="cuda")
    for key in BATCH_KEYS:
        torch.distributed.broadcast(batch[key], source, group=group)
    return batch


def get_batch(data_iterator):
    """Read one micro-batch: this rank's share of the tokens, and where its sequences lie."""
    batch = None
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        batch = {key: batch[key].cuda(non_blocking=True) for key in BATCH_KEYS}
    batch = receive_batch(batch)
    cu_seqlens = batch["cu_seqlens"][0]
    max_seqlen = int(batch["max_seqlen"].max())
    cp_size = mpu.get_context_parallel_world_size()
    if cp_size > 1:
        index = utils.tex.thd_get_partitioned_indices(
            cu_seqlens, batch["tokens"].size(1), cp_size, mpu.get_context_parallel_rank()
        )
        for key in TOKEN_KEYS:
            batch[key] = batch[key].index_select(1, index)
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    return batch, packing


def loss_func(loss_mask, output_tensor):
    """Sum the losses of the trained tokens; Megatron divides by their number."""
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message="the loss is NaN", tolerance=0.0
        )
    return loss, num_tokens, report


def forward_step(data_iterator, model):
    """Run the model on one micro-batch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch, packing = get_batch(data_iterator)
    if count_flops is not None:
        count_flops(packing.cu_seqlens_q)
    timers("batch-generator").stop()
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packing,
    )
    return losses, partial(loss_func, batch["loss_mask"])


def model_provider(
    pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    """Build this pipeline stage's part of the model."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    with_te = args.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_te,
        normalization=args.normalization,
        vp_stage=vp_stage,
    )
    mtp = None
    if args.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=with_te, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


class CountingSequences(torch.utils.data.Dataset):
    """Packs of made-up sequences of different lengths, each of which counts upwards."""

    # Context parallelism cuts every sequence in twice as many chunks as it has ranks.
    multiple = 8

    def __init__(self, size, seq_length, vocab_size):
        self.size, self.seq_length, self.vocab_size = size, seq_length, vocab_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(int(index))
        bounds, tokens, positions = [0], [], []
        while bounds[-1] < self.seq_length:
            length = int(torch.randint(2, 2 + self.seq_length // 2, (), generator=random))
            length = -(-length // self.multiple) * self.multiple
            length = min(length, self.seq_length - bounds[-1])
            start = torch.randint(self.vocab_size, (), generator=random)
            tokens.append((start + torch.arange(length + 1)) % self.vocab_size)
            positions.append(torch.arange(length))
            bounds.append(bounds[-1] + length)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        return {
            "tokens": torch.cat([t[:-1] for t in tokens]),
            "labels": torch.cat([t[1:] for t in tokens]),
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.cat(positions),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": cu_seqlens.diff().max(),
        }


def datasets_provider(train_valid_test_num_samples, vp_stage=None):
    """Build the made-up training, validation and test sets."""
    args = get_args()
    print_rank_0("> building sequences that count upwards ...")
    return tuple(
        CountingSequences(size, args.seq_length, args.vocab_size or 64) if size else None
        for size in train_valid_test_num_samples
    )


def main():
    """Call the pretrain of the installed Megatron: its first argument differs between versions."""
    datasets_provider.is_distributed = True
    call = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    defaults = {"tokenizer_type": "NullTokenizer"}
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args
    except ImportError:  # up to 0.17 pretrain parses the arguments itself
        pretrain(**call, args_defaults=defaults)
    else:
        args = parse_and_validate_args(args_defaults=defaults)
        pretrain(cfg_container=pretrain_cfg_container_from_args(args), **call)


if __name__ == "__main__":
    main()
