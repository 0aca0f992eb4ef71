"""Write a random twin tower of a chosen size, in several files, without ever holding it whole.

    python scripts/make_large_model.py OUT --params 2e9 [--dtype bfloat16] [--max-file-bytes 1e9]

The towers keep the proportions of published ones; the vision tower's depth brings them to the size that is asked for.
Tensors are made and written one by one, so memory is that of the largest one in float32, twice, beside torch itself.
The tokeniser is the demo's, so that the model embeds, though what it says of images means nothing.
The last line is one JSON document.

Source: widths, depths, MLPs, heads: Zhai et al. 2022, "Scaling Vision Transformers", table 2, Touvron et al. 2021 (Ti),
Dehghani et al. 2023 (22B); Lan et al. 2020 (texts), table 1.
"""

import argparse
import json
import math
import resource
import time
from pathlib import Path

from corpus import DEMO_MODEL
from shards.config import ModelConfig
from shards.costs import count_parameters
from shards.fresh import init_model
from shards.preprocess import PreprocessConfig
from shards.tensor_shapes import model_shapes
from shards.towers.kinds import TextTower
from shards.towers.registry import DEFAULT_TEXT
from shards.towers.vit import VitTower

VOCABULARY = 30_000  # the default text tower's; the demo's tokeniser uses the first 3,000
EMBEDDING_DIM = 512

# width, depth, MLP, heads: Ti, S, B, L, g, G, 22B
VISION = (
    (192, 12, 768, 3), (384, 12, 1536, 6), (768, 12, 3072, 12), (1024, 24, 4096, 16), (1408, 40, 6144, 16),
    (1664, 48, 8192, 16), (6144, 48, 24576, 48),
)  # fmt: skip
# hidden size, layers, MLP, heads, and parameters of the whole from which on it is taken: a small one, base to xxlarge
TEXT = (
    (192, 6, 768, 3, 0), (768, 12, 3072, 12, 5e7), (1024, 24, 4096, 16, 3e8), (2048, 24, 8192, 16, 6e8),
    (4096, 12, 16384, 64, 1.2e9),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="model folder to make")
    parser.add_argument("--params", type=float, default=2e9, help="parameters, at least")
    parser.add_argument("--dtype", default="bfloat16", help="what the weights are stored in")
    parser.add_argument("--max-file-bytes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    config = large_config(int(options.params))
    started_s = time.perf_counter()
    init_model(
        config, options.out, seed=options.seed,
        tokenizer_json=(DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"), dtype=options.dtype,
        max_file_bytes=int(options.max_file_bytes),
    )  # fmt: skip
    files = list(options.out.glob("*.safetensors"))
    vision, text = config.vision, config.text
    found = {
        "folder": str(options.out),
        "num_parameters": count_parameters(model_shapes(config)),
        "vision": f"{vision.depth} layers x {vision.width}",
        "text": f"{text.num_hidden_layers} layers x {text.hidden_size}",
        "num_files": len(files),
        "size_bytes": sum(file.stat().st_size for file in files),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
        "wall_s": round(time.perf_counter() - started_s, 1),
    }
    print(json.dumps(found))


def large_config(num_parameters: int) -> ModelConfig:
    """The model whose vision tower is nearest to a published one in depth, with at least as many parameters."""
    hidden, layers, mlp, heads, _ = [each for each in TEXT if each[4] <= num_parameters][-1]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "num_attention_heads": heads}
    text = DEFAULT_TEXT.model_validate({"vocab_size": VOCABULARY, **sizes})
    fitting = [(deep_enough(num_parameters, text, *family), family[1]) for family in VISION]
    return min(fitting, key=lambda found: abs(math.log(found[0].vision.depth / found[1])))[0]


def deep_enough(num_parameters: int, text: TextTower, width: int, _: int, mlp: int, num_heads: int) -> ModelConfig:
    """A model of these widths with as many vision layers as the size needs, 3 at least: one a stage."""

    def of_depth(depth: int) -> ModelConfig:
        vision = VitTower(width=width, depth=depth, num_heads=num_heads, mlp_ratio=mlp / width)
        return ModelConfig(
            name=f"random-{num_parameters:.3g}", trained=False, embedding_dim=EMBEDDING_DIM, vision=vision, text=text,
            preprocess=PreprocessConfig(),
        )  # fmt: skip

    shallow, deeper = (count_parameters(model_shapes(of_depth(depth))) for depth in (3, 4))
    return of_depth(3 + max(0, math.ceil((num_parameters - shallow) / (deeper - shallow))))


if __name__ == "__main__":
    main()
