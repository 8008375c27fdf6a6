"""Fine-tune a GPT with steps of any size, the two lines in a script of one's own.

`install()` before Megatron parses its arguments, `get_batch()` in the forward step; the loss is
the library's. Micro-batches have their own length instead of being padded to a fixed width.

    torchrun --nproc-per-node 8 examples/sft_varlen.py --dynamic-global-batch --rollout-path DIR \
        --rollouts-per-step 32 --max-tokens-per-gpu 8192 --micro-batch-width variable …

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
