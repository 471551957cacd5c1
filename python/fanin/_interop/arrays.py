"""The one way in and out for what the C core does not know by itself: torch, JAX, SciPy, DLPack, objects of the user's
own. This is the core's door (csrc/py asks for these names); behind it

| | |
|---|---|
| `describe` | in: what a gradient is, as a record (`records`) |
| `export` | out: a sum as what went in |
| `classes` | what an object is; `protocols`: what is asked of it |
| `dlpack`, `tables`, `cuda_interface`, `torch`, `scipy`, `sparse` | one library or one way each |
| `streams`, `lifetime` | whose stream, whose allocator |
| `operators` | sums by `combine` or by an object's own + |
| `sharing` | where memory lies, for `overlap` |
"""

from .classes import is_bare
from .describe import describe
from .export import export_dense, export_device, export_sparse
from .lifetime import leaving
from .operators import combine, conform
from .streams import allocator_on, library_stream
from .torch import wrote

__all__ = [
    "allocator_on",
    "combine",
    "conform",
    "describe",
    "export_dense",
    "export_device",
    "export_sparse",
    "is_bare",
    "leaving",
    "library_stream",
    "wrote",
]
