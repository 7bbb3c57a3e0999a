"""Bytes that kernels move, from the text of a program as XLA writes it for GPUs."""

from jaxscale.compiled import hlo
from tools.bench.bytes_moved import bytes_moved

LOOP = """
%slice_of (stack: f32[4,100], i: s32[]) -> f32[1,100] {
  %stack = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row = f32[1,100]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,100}
}

%put_in (stack: f32[4,100], i: s32[], x: f32[100]) -> f32[4,100] {
  %stack = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[100]{0} parameter(2)
  %row = f32[1,100]{1,0} bitcast(%x)
  ROOT %put = f32[4,100]{1,0} dynamic-update-slice(%stack, %row, %i, %i)
}

%add_to (sum: f32[30], x: f32[100]) -> (f32[30], bf16[100]) {
  %sum = f32[30]{0} parameter(0)
  %x = f32[100]{0} parameter(1)
  %more = f32[30]{0} dot(%sum, %x)
  %narrow = bf16[100]{0} convert(%x)
  ROOT %both = (f32[30]{0}, bf16[100]{0}) tuple(%more, %narrow)
}

%narrow_first_of (stack: f32[4,100]) -> bf16[1,100] {
  %stack = f32[4,100]{1,0} parameter(0)
  %narrow = bf16[4,100]{1,0} convert(%stack)
  ROOT %row = bf16[1,100]{1,0} slice(%narrow), slice={[0:1], [0:100]}
}

%body (p: (s32[], f32[4,100], f32[30])) -> (s32[], f32[4,100], f32[30]) {
  %p = (s32[], f32[4,100]{1,0}, f32[30]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[4,100]{1,0} get-tuple-element(%p), index=1
  %sum = f32[30]{0} get-tuple-element(%p), index=2
  %row = f32[1,100]{1,0} fusion(%stack, %i), kind=kLoop, calls=%slice_of
  %x = f32[100]{0} bitcast(%row)
  %both = (f32[30]{0}, bf16[100]{0}) fusion(%sum, %x), kind=kCustom, calls=%add_to
  %more = f32[30]{0} get-tuple-element(%both), index=0
  %put = f32[4,100]{1,0} fusion(%stack, %i, %x), kind=kLoop, calls=%put_in
  ROOT %r = (s32[], f32[4,100]{1,0}, f32[30]{0}) tuple(%i, %put, %more)
}

%condition (p: (s32[], f32[4,100], f32[30])) -> pred[] {
  %p = (s32[], f32[4,100]{1,0}, f32[30]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: (s32[], f32[4,100], f32[30]), w: f32[30]) -> f32[30] {
  %p = (s32[], f32[4,100]{1,0}, f32[30]{0}) parameter(0)
  %w = f32[30]{0} parameter(1)
  %room = f32[4,100]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %row = bf16[1,100]{1,0} fusion(%room), kind=kLoop, calls=%narrow_first_of
  %loop = (s32[], f32[4,100]{1,0}, f32[30]{0}) while(%p), condition=%condition, body=%body
  %sum = f32[30]{0} get-tuple-element(%loop), index=2
  %product = (f32[30]{0}, s8[4096]{0}) custom-call(%sum, %w), custom_call_target="__cublas"
  ROOT %out = f32[30]{0} get-tuple-element(%product), index=0
}
"""


ADD = """
%add_to (stack: f32[4,100], i: s32[], x: f32[1,100]) -> f32[4,100] {
  %stack = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[1,100]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,100]{1,0} READ
  %sum = f32[1,100]{1,0} add(%row, %x)
  ROOT %put = f32[4,100]{1,0} dynamic-update-slice(%stack, %sum, %i, %zero)
}

ENTRY %main (stack: f32[4,100], i: s32[], x: f32[1,100]) -> f32[4,100] {
  %stack = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[1,100]{1,0} parameter(2)
  ROOT %put = f32[4,100]{1,0} fusion(%stack, %i, %x), kind=kLoop, calls=%add_to
}
"""


def test_a_kernel_that_reads_elsewhere_than_it_updates_copies_the_whole_array():
    """A `slice`, whose index is known, is elsewhere to XLA for GPUs."""
    same = "dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,100}"
    other = "dynamic-slice(%stack, %zero, %zero), dynamic_slice_sizes={1,100}"
    known = "slice(%stack), slice={[0:1], [0:100]}"
    counted = [
        bytes_moved(hlo.parse_hlo(ADD.replace("READ", read))) for read in (same, other, known)
    ]
    in_place = 400 + 4 + 400 + 400
    assert counted[0] == in_place
    assert counted[1] == counted[2] == 1600 + 4 + 400 + 1600


def test_a_kernel_moves_what_it_takes_and_returns_and_of_a_stack_its_slice():
    counter = 4
    slice_of = 400 + counter + 400
    add_to = (120 + 400) + (120 + 200)
    put_in = 400 + counter + 400
    condition = 4 + 4 + 1  # the counter, the limit, and the answer
    product = 3 * 120  # its workspace is not data
    narrow_first_of = 400 + 200  # of an array that is allocated, not filled
    found = bytes_moved(hlo.parse_hlo(LOOP))
    assert found == narrow_first_of + 4 * (slice_of + add_to + put_in + condition) + product
