"""What the examples need and none is about: the call of Megatron's pretrain with its GPT."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

if __package__:
    from examples.pretrain_gpt_sft import datasets_provider, model_provider
else:  # scripts see what lies beside them
    from pretrain_gpt_sft import datasets_provider, model_provider


def train_gpt(forward_step, add_arguments=None):
    """Parse Megatron's arguments and train its GPT; `install()` was called before.

    Args:
        forward_step: As Megatron calls it.
        add_arguments: Adds options of the example to the parser.
    """
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
