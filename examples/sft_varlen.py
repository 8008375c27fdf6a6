r"""Fine-tune a GPT with steps of any size, the two lines in a script of one's own.

`install()` before Megatron parses its arguments, `get_batch()` in the forward step; the loss is
the library's. Micro-batches have their own length instead of being padded to a fixed width.

Real size, an 8B model on 8 GPUs:

    torchrun --nproc-per-node 8 examples/sft_varlen.py \
        --dynamic-global-batch --rollout-path /shared/rollouts --rollouts-per-step 64 \
        --max-tokens-per-gpu 16384 --micro-batch-width variable --loss-reduction token \
        --lr 1e-5 --lr-decay-style cosine --lr-warmup-samples 1000 --train-samples 100000 \
        --tensor-model-parallel-size 2 --sequence-parallel \
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
        --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu \
        --disable-bias-linear --untie-embeddings-and-output-weights \
        --position-embedding-type rope --max-position-embeddings 16384 \
        --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/model --eval-iters 0 \
        --load /shared/checkpoint --finetune --save /shared/run --save-interval 100

On a CPU: torchrun --nproc-per-node 2 -m megatron_dynbatch.run --cpu examples/sft_varlen.py …
"""

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt_sft import datasets_provider, model_provider

import megatron_dynbatch
from megatron_dynbatch.losses import sft


def loss_function(output, *, microbatch):
    """The plugin passes `microbatch` because it is asked for by name; it also scales the sum."""
    return sft(output, microbatch, tp_group=mpu.get_tensor_model_parallel_group())


def forward_step(data_iterator, model):
    """Run the model on the micro-batch that the plan has for this rank now."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params(),
    )
    return output, loss_function


if __name__ == "__main__":
    megatron_dynbatch.install()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
