"""DeepSeek-V3 (arXiv 2412.19437), from scratch, without its multi-token prediction module
(model.prediction_depth = 1 adds it).

Command: python -m jaxscale.train --config configs/deepseek_v3.py --workdir runs/deepseek_v3
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 2,048 accelerators of 80 GB, in nodes of 8 whose accelerators share the experts. ZeRO's
  fsdp x expert has to divide d_model and kv_rank, so there are four replicas; up to 512 need one.
Parameters: 671,026,419,200; 37,552,297,472 active per token.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """Shape, routing, batch and learning rate as published, whose batch grows to this one."""
    model = ml_collections.ConfigDict()
    model.family = "deepseek_v3"
    model.num_layers = 61
    model.dense_layers = 3
    model.d_model = 7168
    model.num_heads = 128
    model.num_kv_heads = 128
    model.head_dim = 192
    model.rope_head_dim = 64
    model.value_head_dim = 128
    model.kv_rank = 512
    model.query_rank = 1536
    model.d_ff = 18_432
    model.vocab_size = 129_280
    model.expert_d_ff = 2048
    model.shared_d_ff = 2048

    data = ml_collections.ConfigDict()
    data.global_batch_size = 16_384
    data.seq_len = 4096

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 2.2e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 4
    layout.fsdp = -1
    layout.expert = 8
    layout.zero_stage = 3
    layout.microbatches = 8
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 220_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
