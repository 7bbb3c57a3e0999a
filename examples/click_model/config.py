"""The click model: 65,536 rows of hashed categories, on four devices.

Command: python -m examples.click_model.train (its data is no text, which `train` needs)
Hardware: 2 CPU cores.
Expected: docs/tables.md.
"""

import ml_collections


def get_config():
    """A row of a batch is 32 impressions."""
    model = ml_collections.ConfigDict()
    model.family = "examples.click_model.model:ClickModel"
    model.vocab_size = 2
    model.compute_dtype = "float32"

    data = ml_collections.ConfigDict()
    data.global_batch_size = 8
    data.seq_len = 32

    optimizer = ml_collections.ConfigDict()
    optimizer.clip_norm = 0.0
    optimizer.table_learning_rate = 0.05

    layout = ml_collections.ConfigDict()
    layout.data = 2
    layout.fsdp = 2
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout}
    )
