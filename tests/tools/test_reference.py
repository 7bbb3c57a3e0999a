"""The generated pages of docs/ are what tools/reference.py writes, and are complete."""

import pathlib
import re

import pytest

import jaxscale
from jaxscale import __main__
from tools import reference

DOCS = pathlib.Path("docs")


@pytest.mark.proof(but=("api", "commands", "metrics"))
@pytest.mark.parametrize("page", reference.PAGES)
def test_a_generated_page_is_up_to_date(page):
    written = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert written == reference.PAGES[page](), "run python tools/reference.py"


def test_the_api_page_lists_the_public_names():
    listed = re.findall(r"^      heading: jaxscale\.(\w+)$", reference.api(), re.MULTILINE)
    assert sorted(listed) == sorted(jaxscale.__all__)


def test_every_command_is_listed():
    listed = re.findall(r"^## (\w+)$", reference.commands(), re.MULTILINE)
    assert listed == list(__main__.COMMANDS)


def test_the_cells_of_the_matrix_are_answers_of_the_checks():
    feature = reference.FEATURES["`unroll_layers`"]
    layouts = reference.LAYOUTS
    with reference.prepared_for_eight_devices():
        said = reference.refusal_of(reference.combined(layouts["1F1B"], feature))
        assert said.startswith("layout.unroll_layers = True with layout.pipeline = 2")
        assert not reference.refusal_of(reference.combined(layouts["tensor"], feature))
