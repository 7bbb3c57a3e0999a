"""Overlap of collectives with matmuls, and how long a device waits: programs played by hand."""

import pytest

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import collectives, summed
from jaxscale.compiled.overlap import with_waits

pytestmark = pytest.mark.compiles

MESH = {"fsdp": 4}
GATHERED = 2 * 256 * 256  # bytes
DOT = 2 * 128 * 256 * 256  # operations
GROUPS = "replica_groups={{0,1,2,3}}, dimensions={0}"
START = "(bf16[64,256]{1,0}, bf16[256,256]{1,0}) all-gather-start(%a), channel_id="

HEAD = """
ENTRY %main (a: bf16[64,256], x: bf16[128,256], w: bf16[256,256]) -> bf16[256,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  %x = bf16[128,256]{1,0} parameter(1)
  %w = bf16[256,256]{1,0} parameter(2)
"""
MATMUL = """
  %d = bf16[128,256]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""

ONE_OF_THREE = f"""
%body (p: (s32[], bf16[64,256])) -> (s32[], bf16[64,256]) {{
  %p = (s32[], bf16[64,256]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = bf16[64,256]{{1,0}} get-tuple-element(%p), index=1
  %sync = bf16[256,256]{{1,0}} all-gather(%a), channel_id=3, {GROUPS}
  ROOT %r = (s32[], bf16[64,256]{{1,0}}) tuple(%i, %a)
}}

%condition (p: (s32[], bf16[64,256])) -> pred[] {{
  %p = (s32[], bf16[64,256]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}
{HEAD}
  %early = {START}1, {GROUPS}
  {MATMUL}
  %arrived = bf16[256,256]{{1,0}} all-gather-done(%early)
  %late = {START}2, {GROUPS}
  %waited = bf16[256,256]{{1,0}} all-gather-done(%late)
  %zero = s32[] constant(0)
  %t = (s32[], bf16[64,256]{{1,0}}) tuple(%zero, %a)
  %loop = (s32[], bf16[64,256]{{1,0}}) while(%t), condition=%condition, body=%body
  ROOT %out = bf16[256,256]{{1,0}} add(%arrived, %waited)
}}
"""
"""Of three gathers one is under way during a matmul; one ends as it starts; one blocks, in a loop
of three."""

SHARED = f"""{HEAD}
  %one = {START}1, {GROUPS}
  %two = {START}2, {GROUPS}
  {MATMUL}
  %first = bf16[256,256]{{1,0}} all-gather-done(%one)
  %second = bf16[256,256]{{1,0}} all-gather-done(%two)
  ROOT %out = bf16[256,256]{{1,0}} add(%first, %second)
}}
"""
"""Two gathers that overlap with one matmul."""


def test_bytes_that_overlap_a_matmul_are_counted_run_by_run():
    rows = summed(collectives(hlo.parse_hlo(ONE_OF_THREE), MESH))
    assert sum(one.num_bytes for one in rows) == 5 * GATHERED
    assert sum(one.num_bytes for one in rows if one.overlapped_flops > 0) == GATHERED
    assert sorted((one.asynchronous, one.count, one.overlapped_flops) for one in rows) == [
        (False, 3, 0),
        (True, 1, 0),
        (True, 1, DOT),
    ]


def test_a_device_waits_for_what_its_matmuls_do_not_cover():
    """Each gather takes two seconds, the matmul half of one."""
    program = hlo.parse_hlo(ONE_OF_THREE)
    played = with_waits(program, collectives(program, MESH), lambda one: 2.0, DOT / 0.5)
    waits = {(one.computation, one.first): one.wait_seconds for one in played}
    assert sorted(waits.values()) == [1.5, 2, 2]
    rows = summed(played)
    assert sum(one.link_seconds for one in rows) == 5 * 2
    assert sum(one.wait_seconds for one in rows) == 1.5 + 2 + 3 * 2


@pytest.mark.parametrize(
    ("matmul_seconds", "waits"), [(5.0, [0, 0]), (3.0, [0, 1]), (0.5, [1.5, 2])]
)
def test_two_collectives_share_the_matmul_that_hides_them(matmul_seconds, waits):
    program = hlo.parse_hlo(SHARED)
    played = with_waits(program, collectives(program, MESH), lambda one: 2.0, DOT / matmul_seconds)
    assert [one.wait_seconds for one in played] == waits


def test_without_figures_of_the_links_there_are_no_seconds():
    (row,) = summed(collectives(hlo.parse_hlo(SHARED), MESH))
    assert (row.count, row.link_seconds, row.wait_seconds) == (2, None, None)
