"""The meaning of the inputs and outputs of a graph: `fanin.analysis.descriptors` under its public name."""

from .analysis import descriptors
from .analysis.descriptors import *  # noqa: F403
from .analysis.descriptors import __all__ as __all__

__doc__ = descriptors.__doc__
