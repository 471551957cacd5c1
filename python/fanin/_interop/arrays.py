"""The only import and export of objects that the C core cannot read itself: torch, JAX, SciPy, DLPack, objects of
users.

The core (csrc/py) calls the names of this module:

| | |
|---|---|
| `describe` | import: a gradient as a record (`records`) |
| `export` | export: a sum as the kind of its gradients |
| `classes` | the class of an object; `protocols`: the attributes that are used of it |
| `dlpack`, `tables`, `cuda_interface`, `torch`, `scipy`, `sparse` | one library or one protocol each |
| `streams`, `lifetime` | streams and allocators |
| `operators` | sums by `combine` or by an object's own + |
| `sharing` | addresses, for `overlap` |
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
