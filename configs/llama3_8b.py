"""Llama 3 8B (arXiv 2407.21783), from scratch.

Command: python -m jaxscale.train --config configs/llama3_8b.py --workdir runs/llama3_8b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 64 accelerators of 80 GB or more; 2 sequences per micro-batch each.
Parameters: 8,030,261,248.
Expected: not measured yet on several. On one H200 57 to 58 % MFU at 4 sequences a step, with
  XLA_CLIENT_MEM_FRACTION=0.96, --config.data.global_batch_size=4
  --config.data.objective=causal_across_documents --config.layout.zero_stage=2
  --config.layout.unroll_layers=True --config.layout.remat=save_matmuls
  --config.optimizer.moment_dtype=bfloat16 --config.optimizer.second_moment_dtype=bfloat16
  --config.optimizer.moment_rounding=stochastic; 1.32 times as fast with
  --config.model.matmul_dtype=float8 (docs/benchmarks.md).
"""

import ml_collections


def get_config():
    """The shape is published; the run is a choice of ours: 4M tokens a step, 420B tokens in all."""
    model = ml_collections.ConfigDict()
    model.num_layers = 32
    model.d_model = 4_096
    model.num_heads = 32
    model.num_kv_heads = 8
    model.head_dim = 128
    model.d_ff = 14_336
    model.vocab_size = 128_256
    model.rope_theta = 500_000.0

    data = ml_collections.ConfigDict()
    data.global_batch_size = 512
    data.seq_len = 8192

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 3e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = 4
    layout.remat = "auto"

    run = ml_collections.ConfigDict()
    run.steps = 100_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
