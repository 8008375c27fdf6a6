#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, not changed, with steps of any size: nothing but flags.
#
#   bash examples/pretrain_gpt_dynamic.sh                      # tiny, on two CPU processes
#   MEGATRON_LM=DIR bash examples/pretrain_gpt_dynamic.sh      # pretrain_gpt.py of that checkout
#
# Without MEGATRON_LM it runs examples/pretrain_gpt_sft.py, a script of the same shape. Both write
# $OUT/steps.jsonl, one line per step. PYTHON and OUT may be set; arguments are added to Megatron's.
#
# Real size, an 8B model on one node of 8 GPUs (tensor parallel 2, context parallel 2, so data
# parallel 2), from a Megatron-LM checkout; --load is a checkpoint to start from:
#
#   torchrun --nproc-per-node 8 -m megatron_dynbatch.run pretrain_gpt.py \
#       --dynamic-global-batch --rollout-path /shared/rollouts --rollouts-per-step 64 \
#       --max-tokens-per-gpu 8192 --loss-reduction rollout --leftover even \
#       --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
#       --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
#       --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu \
#       --disable-bias-linear --untie-embeddings-and-output-weights \
#       --position-embedding-type rope --rotary-base 500000 --max-position-embeddings 16384 \
#       --attention-dropout 0 --hidden-dropout 0 --attention-backend flash \
#       --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
#       --recompute-granularity selective \
#       --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/model \
#       --lr 1e-6 --min-lr 1e-6 --lr-decay-style constant --lr-warmup-samples 640 \
#       --weight-decay 0.1 --clip-grad 1.0 --train-samples 64000 --eval-iters 0 --log-interval 1 \
#       --load /shared/checkpoint --finetune --save /shared/run --save-interval 100 \
#       --ckpt-format torch_dist --step-report /shared/run/steps.jsonl
#
# The width of a micro-batch, --seq-length, follows from the cap: 8192 tokens on each of two
# context-parallel GPUs are 16384. Several nodes: docs/launch.md.
set -euo pipefail

here="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$here/.venv/bin/python}"
[ -x "$python" ] || python="${PYTHON:-python3}"
out="${OUT:-$here/runs/pretrain_gpt_dynamic}"
script="${MEGATRON_LM:+$MEGATRON_LM/pretrain_gpt.py}"
script="${script:-$here/examples/pretrain_gpt_sft.py}"
export OMP_NUM_THREADS=1 PYTHONPATH="${MEGATRON_LM:+$MEGATRON_LM:}$here${PYTHONPATH:+:$PYTHONPATH}"

rm -rf "$out"
mkdir -p "$out"

# Four batches of 8, 5, 12 and 3 rollouts; every rollout emits one to three samples that count up.
"$python" - "$out/rollouts" <<'PYTHON'
import sys

from megatron_dynbatch import RolloutDirectory, Sample

rollouts = RolloutDirectory(sys.argv[1])
for size in (8, 5, 12, 3):
    rollouts.write(
        [
            Sample([(first + k) % 64 for k in range(6 + 5 * part + rollout)],
                   response_length=4 + rollout, rollout_id=rollout)
            for rollout in range(size)
            for part in range(1 + rollout % 3)
            for first in [7 * rollout + part]
        ]
    )
rollouts.finish()
PYTHON

"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m megatron_dynbatch.run --cpu "$script" \
    --dynamic-global-batch --rollout-path "$out/rollouts" --rollouts-per-step 12 \
    --max-tokens-per-gpu 128 --train-iters 4 --lr 1e-2 --lr-decay-style constant \
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 128 \
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
    --tokenizer-type NullTokenizer --vocab-size 64 --eval-iters 0 --log-interval 1 \
    --step-report "$out/steps.jsonl" "$@"
