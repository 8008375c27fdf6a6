r"""A loss of your own: ten lines that are right under every packing and layout.

The plugin hands over `microbatch` because the loss asks for it by name. Labels, mask and columns
(advantages, log_probs, …) are aligned with the model's output on this rank; `mean(x)` weighs every
trained token as the step's reduction wants it. Nothing here knows of data or context parallelism.

Real size, an 8B model on 8 GPUs:

    torchrun --nproc-per-node 8 examples/custom_loss.py \
        --dynamic-global-batch --rollout-path /shared/rollouts --rollouts-per-step 64 \
        --max-tokens-per-gpu 16384 --micro-batch-width variable --loss-reduction token \
        --lr 1e-5 --train-samples 100000 \
        --tensor-model-parallel-size 2 --sequence-parallel \
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
        --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu \
        --disable-bias-linear --untie-embeddings-and-output-weights \
        --position-embedding-type rope --max-position-embeddings 16384 \
        --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/model --eval-iters 0 \
        --load /shared/checkpoint --finetune --save /shared/run --save-interval 100

To see that it is right:

    megatron-dynbatch verify examples/custom_loss.py
"""

from megatron.core import mpu
from tiny_gpt import train_gpt

import megatron_dynbatch
from megatron_dynbatch.losses import model_output, token_log_probs


def focal_loss(output, *, microbatch):
    """x = −(1 − p)²·log p of each label (arXiv:1708.02002 eq. 4, γ = 2): easy tokens count less."""
    group = mpu.get_tensor_model_parallel_group()
    log_p, _ = token_log_probs(output, microbatch, tp_group=group)
    focal = -(1 - log_p.exp()) ** 2 * log_p
    easy = (log_p.exp() > 0.5).float()
    loss = microbatch.mean(focal)
    return loss, {
        "focal loss": loss,
        "cross entropy": microbatch.mean(-log_p),
        "easy tokens": microbatch.mean(easy),
    }


def forward_step(data_iterator, model):
    """Run the model on the micro-batch that the plan has for this rank now."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    return model_output(model, batch), focal_loss


if __name__ == "__main__":
    megatron_dynbatch.install()
    train_gpt(forward_step)
