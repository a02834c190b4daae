"""A small Llama, as the configuration of a Hugging Face model, and how many numbers it has."""

from __future__ import annotations

from typing import Any, Final

HIDDEN, INNER, LAYERS, WORDS = 64, 128, 2, 1000
LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
}
IN_LAYERS: Final = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
"""Numbers of the linear layers of blocks."""
NORMS: Final = (2 * LAYERS + 1) * HIDDEN
"""Numbers of the norms."""
