"""What ZeRO stages do, for one stage and for many."""

import numpy as np
import pytest

from jaxscale.config import zero_stage

STAGES = np.arange(4)


@pytest.mark.parametrize(
    ("rule", "stages"),
    [
        (zero_stage.replicates, {0}),
        (zero_stage.shards_state, {1, 2, 3}),
        (zero_stage.keeps, {1, 2}),
        (zero_stage.gathers_each_pass, {3}),
        (zero_stage.scatters, {2, 3}),
        (zero_stage.scatters_last, {1}),
        (lambda stage: zero_stage.leaves_shards(stage, True), {1, 2, 3}),
        (lambda stage: zero_stage.leaves_shards(stage, False), {2, 3}),
        (lambda stage: zero_stage.remains(stage, 2, 1), {0, 1}),
        (lambda stage: zero_stage.remains(stage, 1, 1), set()),
        (lambda stage: zero_stage.remains(stage, 1, 2), {0, 1, 2, 3}),
    ],
)
def test_a_rule_holds_for_these_stages(rule, stages):
    assert {stage for stage in range(4) if rule(stage)} == stages
    assert set(STAGES[rule(STAGES) & True]) == stages
