"""Transfers of host memory, read from a compiled program."""

from jaxscale.compiled.hlo import parse_hlo
from jaxscale.compiled.host_transfers import HostTransfer, host_transfers

# Layer weights are read in a loop of three trips beside a matmul of 2 x 8 x 8 x 8 FLOPs; moments
# are read and written outside of it, beside nothing.
PROGRAM = r"""
%body (p: (s32[], f32[4,8,8], f32[8,8])) -> (s32[], f32[4,8,8], f32[8,8]) {
  %p = (s32[], f32[4,8,8]{2,1,0:S(5)}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[4,8,8]{2,1,0:S(5)} get-tuple-element(%p), index=1
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=2
  %s = ((f32[4,8,8]{2,1,0:S(5)}, s32[]), f32[1,8,8]{2,1,0}) dynamic-slice-start(%stack, %i)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[1,8,8]{2,1,0} dynamic-slice-done(%s)
  ROOT %t = (s32[], f32[4,8,8]{2,1,0:S(5)}, f32[8,8]{1,0}) tuple(%i, %stack, %y)
}

%cond (p: (s32[], f32[4,8,8], f32[8,8])) -> pred[] {
  %p = (s32[], f32[4,8,8]{2,1,0:S(5)}, f32[8,8]{1,0}) parameter(0)
  ROOT %r = pred[] constant(true)
}

ENTRY %main (a: f32[4,8,8], m: f32[16,8], x: f32[8,8]) -> f32[16,8] {
  %a = f32[4,8,8]{2,1,0:S(5)} parameter(0), metadata={op_name="params[\'up\']"}
  %m = f32[16,8]{1,0:S(5)} parameter(1), metadata={op_name="mu[\'up\']"}
  %x = f32[8,8]{1,0} parameter(2)
  %n = s32[] constant(0)
  %t = (s32[], f32[4,8,8]{2,1,0:S(5)}, f32[8,8]{1,0}) tuple(%n, %a, %x)
  %w = (s32[], f32[4,8,8], f32[8,8]) while(%t), condition=%cond, body=%body, known_trip_count:{n:3}
  %in = (f32[16,8]{1,0}, f32[16,8]{1,0:S(5)}, u32[]) copy-start(%m)
  %mu = f32[16,8]{1,0} copy-done(%in)
  %on_chip = f32[16,8]{1,0:S(1)} copy(%mu)
  %out = (f32[16,8]{1,0:S(5)}, f32[16,8]{1,0}, u32[]) copy-start(%mu)
  ROOT %new = f32[16,8]{1,0:S(5)} copy-done(%out)
}
"""


def test_transfers_have_the_array_the_bytes_and_the_matmuls_beside_them():
    found = host_transfers(parse_hlo(PROGRAM))
    assert sorted(found, key=lambda one: one.array) == [
        HostTransfer("f32[16,8]", True, 1, 512, 0),
        HostTransfer("mu['up']", False, 1, 512, 0),
        HostTransfer("params['up']", False, 3, 256, 1024),
    ]
