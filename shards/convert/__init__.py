"""Import and export of checkpoints of timm and transformers.

torch, timm and transformers are imported when a function is called.
"""

from shards.convert.dual_encoder import export_vision_text_dual_encoder
from shards.convert.timm_and_albert import import_timm_and_albert
from shards.convert.transformers_model import import_transformers

__all__ = ["export_vision_text_dual_encoder", "import_timm_and_albert", "import_transformers"]
