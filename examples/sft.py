r"""Supervised fine-tuning in one file, with steps of any size: the whole script, nothing imported.

On a CPU, with rollouts in the directory `rollouts`:

    torchrun --nproc-per-node 2 -m megatron_dynbatch.run --cpu examples/sft.py \
        --dynamic-global-batch --rollout-path rollouts --rollouts-per-step 8 \
        --max-tokens-per-gpu 1024 --micro-batch-width variable \
        --lr 1e-3 --lr-decay-style constant --train-samples 100 \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 1024 \
        --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 256 \
        --eval-iters 0 --step-report runs/sft/steps.jsonl
"""

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

import megatron_dynbatch
from megatron_dynbatch.losses import sft


def model_provider(
    pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    """Megatron's GPT, as in any pretrain script."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


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


def no_datasets(num_samples, vp_stage=None):
    """Steps come from rollouts; Megatron asks for datasets all the same."""
    return None, None, None


if __name__ == "__main__":
    megatron_dynbatch.install()  # before Megatron parses its arguments
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args),
        no_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
