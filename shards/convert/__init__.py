"""Import and export of checkpoints of timm, transformers and open_clip.

torch, timm and transformers are imported when a function is called.
"""

from shards.convert.checkpoint import find_checkpoint, import_checkpoint, import_config
from shards.convert.dual_encoder import export_vision_text_dual_encoder
from shards.convert.reranker import import_reranker
from shards.convert.timm_and_text import import_timm_and_text
from shards.convert.transformers_model import import_transformers

__all__ = [
    "export_vision_text_dual_encoder",
    "find_checkpoint",
    "import_checkpoint",
    "import_config",
    "import_reranker",
    "import_timm_and_text",
    "import_transformers",
]
