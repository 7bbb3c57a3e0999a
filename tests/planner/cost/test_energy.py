"""Power, energy and goodput against published anchors."""

import pytest

from jaxscale.config import load
from jaxscale.planner.cost import energy
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.step import step_cost
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.search.trainable_model import TrainableModel

LLAMA = TrainableModel(load("llama2_7b")).work


@pytest.mark.parametrize(
    ("hours", "watts", "overhead", "mwh"),
    [
        (809_472, 400, 1.1, 356),  # OPT, as LLaMA's table 15 counts
        (1_082_880, 400, 1.1, 475),  # BLOOM, there
        (1024 * 574, 326, 1.11, 213),  # GLaM, 280B tokens
    ],
)
def test_joules_are_those_of_published_tables(hours, watts, overhead, mwh):
    joules = energy.run_joules(hours, watts, overhead)
    assert joules / 3.6e9 == pytest.approx(mwh, rel=0.01)


def test_goodput_at_sixteen_thousand_devices():
    """Stops every 3.1 hours: saves of 10 s cost 4.2 per cent, of 60 s 10.4, of 300 s 23, by Young's
    interval, to which Daly's is the next order."""
    for save, every, lost in ((10, 7.9, 4.2), (60, 19, 10.4), (300, 43, 23)):
        found = energy.goodput(16384, checkpoint_seconds=save, restart_seconds=0)
        assert found.between_failures_seconds / 3600 == pytest.approx(3.1, rel=0.01)
        assert found.checkpoint_every_seconds / 60 == pytest.approx(every, rel=0.08)
        assert 100 * (1 - found.fraction) == pytest.approx(lost, rel=0.06)


def test_more_devices_leave_less():
    fractions = [energy.goodput(2**n).fraction for n in range(3, 18)]
    assert fractions == sorted(fractions, reverse=True)
    assert energy.goodput(10**9).fraction == 0


def test_a_bill_counts_tokens_devices_and_prices():
    machine, parallelism = make_cluster("h100", 256), Parallelism(fsdp=256)
    seconds = step_cost(LLAMA, machine, parallelism)
    tokens = float(parallelism.global_batch) * LLAMA.seq_len
    once = energy.run_cost(machine, seconds, tokens, 1e12)
    twice = energy.run_cost(machine, seconds, tokens, 2e12)
    assert twice.seconds == pytest.approx(2 * once.seconds)
    assert once.usd == pytest.approx(once.seconds / 3600 * 256 * 10.8)
    assert once.seconds > 1e12 / tokens * seconds.step_seconds
    assert 0.3 * 700 < energy.mean_watts(seconds, machine) < 700
    # Servers and building on top.
    assert once.joules > once.seconds * 256 * energy.mean_watts(seconds, machine)
