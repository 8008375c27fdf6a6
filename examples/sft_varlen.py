r"""Fine-tune a GPT on chats with steps of any size, the two lines in a script of one's own.

`install()` before Megatron parses its arguments, `get_batch()` in the forward step; the loss is
the library's. Micro-batches have their own length instead of being padded to a fixed width. With
--chat-jsonl the script makes the rollouts itself: a conversation per line,

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}

of which what the assistant says is trained. A step is then as many whole conversations as a token
budget holds.

Real size, an 8B model on 8 GPUs:

    torchrun --nproc-per-node 8 examples/sft_varlen.py \
        --dynamic-global-batch --rollout-path /shared/rollouts \
        --chat-jsonl /shared/chats.jsonl --rollouts-per-step batch \
        --step-splitter tokens --tokens-per-step 262144 \
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

On a CPU, with a file of a few such lines; text is its UTF-8 bytes where there is no tokenizer:

    torchrun --nproc-per-node 2 -m megatron_dynbatch.run --cpu examples/sft_varlen.py \
        --dynamic-global-batch --rollout-path runs/sft/rollouts \
        --chat-jsonl chats.jsonl --rollouts-per-step batch \
        --step-splitter tokens --tokens-per-step 2048 \
        --max-tokens-per-gpu 1024 --micro-batch-width variable --loss-reduction token \
        --lr 1e-3 --lr-decay-style constant --train-samples 100 \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 1024 \
        --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 \
        --eval-iters 0 --step-report runs/sft/steps.jsonl
"""

import itertools
import json

import torch.distributed as dist
from megatron.core import mpu
from megatron.training import get_args, get_tokenizer
from tiny_gpt import train_gpt

import megatron_dynbatch
from megatron_dynbatch import RolloutDirectory, Sample
from megatron_dynbatch.losses import sft

CONVERSATIONS_PER_BATCH = 4096


def add_arguments(parser):
    """Options of the example."""
    group = parser.add_argument_group("chats")
    group.add_argument("--chat-jsonl", help="conversations; without them DIR has rollouts already")
    group.add_argument(
        "--message-format",
        default="<|{role}|>\n{content}\n",
        help="what is tokenized of a message (default: the role in a line before the content)",
    )
    return parser


def text_encoder(tokenizer):
    """Text → token ids. Megatron's NullTokenizer knows no text: ids are then UTF-8 bytes."""
    args = get_args()
    if args.tokenizer_type != "NullTokenizer":
        return tokenizer.tokenize
    if tokenizer.vocab_size < 257:
        raise ValueError(
            f"--vocab-size {tokenizer.vocab_size}: text as UTF-8 bytes and an end need 257 ids; "
            "give --vocab-size 257, or a tokenizer (--tokenizer-type, --tokenizer-model)"
        )
    return lambda text: list(text.encode())


def to_sample(messages, encode, eod, message_format):
    """One conversation as a sample whose loss mask is 1 where the assistant speaks."""
    tokens, mask = [], []
    for message in messages:
        own = list(encode(message_format.format(**message)))
        is_trained = message["role"] == "assistant"
        own += [eod] * is_trained
        tokens += own
        mask += [int(is_trained)] * len(own)
    if not any(mask[1:]):
        raise ValueError("nothing to train: no message of the assistant after the first token")
    first = max(1, mask.index(1))
    return Sample(tokens, loss_mask=mask[first:])


def write_conversations(cursor, model):
    """Called at the step boundary, on every rank, while a batch is not there."""
    args = get_args()
    if args.chat_jsonl is None or cursor.batch_id > 0 or dist.get_rank() > 0:
        return
    directory, tokenizer = RolloutDirectory(args.rollout_path), get_tokenizer()
    encode = text_encoder(tokenizer)

    def samples():
        with open(args.chat_jsonl, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    messages = json.loads(line)["messages"]
                    yield to_sample(messages, encode, tokenizer.eod, args.message_format)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{args.chat_jsonl}, line {number}: {error!r}") from error

    for batch in itertools.batched(samples(), CONVERSATIONS_PER_BATCH):
        directory.write(batch)
    directory.finish()


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
    megatron_dynbatch.on_batch_needed(write_conversations)
    train_gpt(forward_step, add_arguments)
