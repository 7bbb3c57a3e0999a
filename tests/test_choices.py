"""Refusing a name that is not known."""

import re

import pytest

from jaxscale.choices import check_choice


def test_what_is_allowed_passes_and_a_refusal_names_the_nearest() -> None:
    check_choice("optimizer.name", "lion", ("adamw", "lion"))
    refused = "optimizer.name = 'adam' is not known; it can be adamw, lion; did you mean 'adamw'?"
    with pytest.raises(ValueError, match=re.escape(refused)):
        check_choice("optimizer.name", "adam", ("adamw", "lion"))
    with pytest.raises(ValueError, match=r"it can be adamw, lion$"):
        check_choice("optimizer.name", 3, ("adamw", "lion"))
