"""Laws of the batch size: the hyperbola of steps and data, its fit, and the ramp."""

import numpy as np
import pytest

from jaxscale.studies.critical_batch import measured_noise, ramp_of, recent_means
from jaxscale.studies.laws.critical_batch import (
    CriticalBatch,
    batch_ramp,
    critical_tokens,
    data_to_loss,
    fit_critical_batch,
    steps_to_loss,
)

LAW = CriticalBatch(least_steps=120.0, batch=37.0, error=0.0)
SIZES = np.geomspace(1, 4096, 25).tolist()


def test_steps_and_data_are_on_the_hyperbola():
    for size in SIZES:
        steps, data = steps_to_loss(LAW, size), data_to_loss(LAW, size)
        assert data == pytest.approx(steps * size, rel=1e-14)
        curve = (steps / LAW.least_steps - 1) * (data / LAW.least_data - 1)
        assert curve == pytest.approx(1, rel=1e-12)
    assert data_to_loss(LAW, LAW.batch) == pytest.approx(2 * LAW.least_data, rel=1e-14)


def test_a_fit_recovers_the_law():
    exact = fit_critical_batch(SIZES, [steps_to_loss(LAW, size) for size in SIZES])
    assert exact.batch == pytest.approx(LAW.batch, rel=1e-3)
    assert exact.least_steps == pytest.approx(LAW.least_steps, rel=1e-3)
    assert exact.error < 1e-3
    rng = np.random.default_rng(0)
    noisy = [steps_to_loss(LAW, size) * np.exp(0.05 * rng.normal()) for size in SIZES]
    found = fit_critical_batch(SIZES, noisy)
    assert found.batch == pytest.approx(LAW.batch, rel=0.15)
    assert found.error == pytest.approx(0.05, rel=0.3)
    with pytest.raises(ValueError, match=r"steps with the batches \[4\]; a fit needs two or more"):
        fit_critical_batch([4, 4], [10, 11])


def test_a_ramp_follows_the_noise_scale_and_never_shrinks():
    noise = [(0, 1), (100, 17), (200, 9), (400, 40)]
    ramp = batch_ramp(noise, [4, 8, 16, 32], 1000)
    assert ramp == {0: 4, 25: 16, 44: 32}
    assert 25 * 4 == 100
    assert 25 * 4 + 19 * 16 >= 400


def test_the_published_law_has_its_recalled_values():
    """Derived from constants that are uncertain: facts of section 9."""
    for loss, millions in ((4.0, 0.27), (3.0, 1.07), (2.0, 7.4), (1.7, 16)):
        assert critical_tokens(loss) / 1e6 == pytest.approx(millions, rel=0.02)


def test_rows_of_a_run_give_its_noise_and_its_ramp():
    rows = [
        {"part": "noise", "sequences": 32, "step": step, "read_sequences": 32 * step}
        | {"noise_sequences": scale}
        for step, scale in ((5, None), (10, 6.0), (15, 10.0), (20, 20.0))
    ]
    assert measured_noise(rows) == 12
    assert ramp_of(rows) == {0: 4, 120: 8}, "the last measurement is the end of the run"
    assert recent_means([1.0] * 20 + [2.0] * 10)[-1] == 2.0
