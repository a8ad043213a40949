"""Train language models on sequences of very different lengths, with MindSpore.

`SeqLens` and the errors need NumPy only; everything that needs MindSpore is imported from its own module, for example
``from ms_varlen.ops.attention import varlen_attention``.
"""

from ms_varlen.errors import CheckpointError, DataError, LengthsError, RecipeError, ShapesError, VarlenError
from ms_varlen.lengths import SeqLens

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataError",
    "LengthsError",
    "RecipeError",
    "SeqLens",
    "ShapesError",
    "VarlenError",
    "__version__",
]
