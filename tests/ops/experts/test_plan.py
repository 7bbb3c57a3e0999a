"""The nodes of a token in the exchange over nodes."""

import itertools

import numpy as np
import pytest

from jaxscale.ops.experts.plan import most_nodes, nodes_of_tokens

EXPERTS, CHOICES, TOKENS = 24, 6, 200


@pytest.mark.parametrize(("nodes", "groups"), [*itertools.product((1, 2, 3, 4, 6), (1, 2, 4, 8))])
def test_no_token_has_more_nodes_than_there_is_room_for(nodes, groups):
    """Of choices at random in the groups that are kept."""
    rng = np.random.default_rng(0)
    for kept in range(1, groups + 1):
        most = min(CHOICES, most_nodes(nodes, groups, kept))
        size = EXPERTS // groups
        allowed = [
            np.concatenate([group * size + np.arange(size) for group in chosen[:kept]])
            for chosen in (rng.permutation(groups) for _ in range(TOKENS))
        ]
        each = min(CHOICES, kept * size)
        experts = np.array([rng.permutation(one)[:each] for one in allowed])[None]
        found = np.asarray(nodes_of_tokens(experts, EXPERTS // nodes, nodes, min(each, most)))[0]
        for token, chosen in zip(found, experts[0] // (EXPERTS // nodes)):
            assert {*token.tolist()} - {-1} == {*chosen.tolist()}
