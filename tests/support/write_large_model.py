"""Write a random twin tower of a chosen size, in several files, without ever holding it whole; prints what it took.

    python write_large_model.py OUT PARAMETERS MAX_FILE_BYTES

Tensors are made and written one by one, so memory is that of the largest one in float32, twice, besides torch itself.
The tokeniser is the demo's, so that the model embeds, though what it says of images means nothing.
"""

import json
import math
import resource
import sys
from pathlib import Path

import embedder
from shards.costs import count_parameters
from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.tensor_shapes import model_shapes
from shards.towers.registry import DEFAULT_TEXT
from shards.towers.vit import VitTower

TOKENIZER = Path(embedder.__file__).parent / "demo_model/tokenizer.json"
TEXT = {"vocab_size": 30_000, "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3}


def of_depth(depth: int, width: int) -> ModelConfig:
    return ModelConfig(
        name="random",
        trained=False,
        embedding_dim=512,
        vision=VitTower(width=width, depth=depth, num_heads=width // 64),
        text=DEFAULT_TEXT.model_validate(TEXT | {"intermediate_size": 768}),
        preprocess=PreprocessConfig(),
    )


def at_least(num_parameters: int) -> ModelConfig:
    """A model with as many vision layers as the size needs, 3 at least: one a stage."""
    width = 768 if num_parameters > 2e7 else 192
    shallow, deeper = (count_parameters(model_shapes(of_depth(depth, width))) for depth in (3, 4))
    return of_depth(3 + max(0, math.ceil((num_parameters - shallow) / (deeper - shallow))), width)


if __name__ == "__main__":
    out, num_parameters, max_file_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = at_least(num_parameters)
    tokenizer_json = TOKENIZER.read_text(encoding="utf-8")
    settings = {"seed": 0, "tokenizer_json": tokenizer_json, "dtype": "bfloat16", "max_file_bytes": max_file_bytes}
    init_model(config, out, **settings)
    files = list(out.glob("*.safetensors"))
    found = {
        "num_parameters": count_parameters(model_shapes(config)),
        "num_files": len(files),
        "size_bytes": sum(file.stat().st_size for file in files),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
    }
    print(json.dumps(found))
