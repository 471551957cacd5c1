"""Numbers of the kinds of arrays that the core cannot read itself, in the order of `export.KINDS`."""

from .. import _core

TORCH, JAX, SCIPY_ARRAY, SCIPY_MATRIX, TORCH_PARTS = range(_core.FROM_FOREIGN, _core.FROM_FOREIGN + 5)
LAST = 255  # an origin is a byte
