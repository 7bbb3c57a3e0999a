"""Skipped examples are left out, whatever was skipped before."""

import pytest

from jaxscale.data.dataset import SourceProgress
from jaxscale.data.skipped_ranges import ranges_of, skip_examples, with_ranges


class Numbers:
    """Examples that are their own numbers."""

    def __getitem__(self, index):
        return index

    def example_digest(self, indices):
        return str(list(indices))

    def progress(self, num_examples):
        return [SourceProgress("", num_examples, 10)]


@pytest.mark.parametrize(
    ("passed", "ranges"),
    [
        ([(4, 8)], ((4, 8),)),
        ([(4, 8), (4, 6)], ((4, 10),)),
        ([(4, 8), (2, 6)], ((2, 10),)),
        ([(4, 8), (0, 2), (8, 12)], ((0, 2), (4, 8), (14, 18))),
        ([(4, 8), (2, 4)], ((2, 8),)),
    ],
)
def test_the_rest_keeps_its_order(passed, ranges):
    """As a list from which parts are cut, one after the other."""
    rest, examples = list(range(40)), Numbers()
    for first, last in passed:
        del rest[first:last]
        examples = skip_examples(examples, first, last)
    assert ranges_of(examples) == ranges
    again = with_ranges(Numbers(), [list(one) for one in ranges])
    for some in (examples, again):
        assert [some[i] for i in range(len(rest))] == rest
        assert some.example_digest(range(3)) == str(rest[:3])
        assert some.progress(5)[0].seen == rest[4] + 1
