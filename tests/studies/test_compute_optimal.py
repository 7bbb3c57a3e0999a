"""The study's runs have the sizes and FLOPs that it states, and its fits recover a law."""

import math

import numpy as np
import pytest

from jaxscale.config.optimizer import prunes_by_rule
from jaxscale.studies import compute_optimal, compute_optimal_fits
from jaxscale.studies.compute_optimal import COMPUTE_OPTIMAL, SIZES, sized_config
from jaxscale.studies.laws.chinchilla import ScalingLaw
from jaxscale.studies.laws.sparse import SparseLaw
from jaxscale.training.tracing.traces import model_trace

LAW = ScalingLaw(0.5, 40.0, 60.0, 0.35, 0.3)


def made_rows():
    """Rows of the whole study with losses of known laws instead of training."""
    sparse_law, rows = SparseLaw(3.0, 0.8, 37.0, 0.35, 8e5, 0.3, 0.5), []
    for case in COMPUTE_OPTIMAL.cases(False, ""):
        size = SIZES[case["size"]]
        tokens = case["flops"] / 6 / size.params
        weights = size.params - round(case["sparsity"] * size.matrices)
        loss = sparse_law.loss(case["sparsity"], weights, tokens)
        if case["objective"] != "clm":
            loss = LAW.loss(size.params, tokens) * (1 + (case["clm_share"] - 0.2) ** 2)
        measured = {"params": size.params, "weights": weights, "tokens": tokens, "steps": 1}
        measured |= {"batch_tokens": 1, "learning_rate": 1.0, "eval_loss": loss}
        rows.append({**case, **measured, "step_seconds": 1.0})
    return rows


def test_the_whole_form_has_the_runs_of_the_page():
    cases = COMPUTE_OPTIMAL.cases(False, "")
    counts = [
        sum(one["objective"] == objective and bool(one["sparsity"]) == sparse for one in cases)
        for objective, sparse in (("clm", False), ("clm", True), ("mlm", False), ("handoff", False))
    ]
    assert counts == [28, 20, 8, 3]
    assert len({str(one) for one in cases}) == len(cases) == 59
    dense = [one["flops"] for one in cases if one["objective"] == "clm" and not one["sparsity"]]
    assert dense == sorted(dense)


@pytest.mark.parametrize("name", ["30k", "1M"])
def test_a_size_has_the_parameters_that_are_counted(name):
    size = SIZES[name]
    trace = model_trace(sized_config(size, 1e11, causal=True).model)
    layers = [one for one in trace.parameters if one.in_layers]
    norm = [one for one in trace.parameters if one.path == "head/norm/scale"]
    counts = [one.size * trace.stack_layers.get(one.part, 1) for one in (*layers, *norm)]
    assert sum(counts) == size.params
    pruned = [one.size for one in layers if prunes_by_rule(("layers", *one.axes))]
    assert sum(pruned) * size.num_layers == size.matrices


@pytest.mark.proof
def test_a_run_has_its_flops_and_a_cosine_over_its_length():
    for size in SIZES.values():
        for flops in compute_optimal.BUDGETS:
            config = sized_config(size, flops, causal=True)
            tokens = config.run.steps * config.data.global_batch_size * config.data.seq_len
            assert 6 * size.params * tokens == pytest.approx(flops, rel=0.01)
            assert config.schedule_steps == config.run.steps
            warmup = config.optimizer.warmup_steps
            assert warmup == math.ceil(0.05 * config.run.steps)
            evaluated = config.run.eval_batches * config.data.global_batch_size
            assert evaluated == compute_optimal.EVAL_SEQUENCES
    masked = sized_config(SIZES["30k"], 1e11, causal=False, init_from="there")
    assert (masked.data.objective, masked.model.causal) == ("masked", False)
    assert not masked.optimizer.keep_state
    sparse = sized_config(SIZES["30k"], 1e11, causal=True, sparsity=0.75)
    rule = sparse.optimizer
    assert rule.sparsity_begin + (rule.sparsity_steps or 0) <= 0.75 * sparse.run.steps


def test_fits_of_the_study_recover_the_law_of_its_rows():
    rows = made_rows()
    found = compute_optimal_fits.find_exponents(rows)
    assert found["parametric"].value == pytest.approx(LAW.exponent, abs=1e-3)
    assert found["IsoFLOP"].value == pytest.approx(LAW.exponent, abs=0.02)
    for one in found.values():
        low, high = one.interval
        assert low <= one.value <= high
    law = compute_optimal_fits.fit_sparse_law(rows).law
    assert law.gain(0.75) == pytest.approx(1.18, abs=0.1)
    losses = compute_optimal_fits.handoff_losses(rows)
    assert list(losses) == [0.0, 0.15, 0.3, 0.5]
    assert min(losses, key=lambda share: losses[share]) == 0.15
    comparisons = compute_optimal_fits.compare_fits(rows)
    assert comparisons[0].ours.startswith(f"{found['envelope'].value:.2f} (")
    assert comparisons[-1].ours == "15% of 0%, 15%, 30%, 50%"
    assert not any("refused" in one for one in compute_optimal_fits.describe_fits(rows))
    (figure,) = compute_optimal_fits.draw_fits(rows).values()
    assert len(figure.axes) == 4


def test_fits_of_too_few_runs_are_refused_in_words():
    rows = [row for row in made_rows() if row["size"] == "30k"]
    for one in compute_optimal_fits.find_exponents(rows).values():
        assert "have 1 model size, and a law" in str(one)
        assert np.isnan(one.value)
    assert len(compute_optimal_fits.draw_fits(rows)) == 1
    assert any("refused" in one for one in compute_optimal_fits.describe_fits(rows))
