"""TransformerEngine's way of saving quantized tensors, in pure torch, so that the case runs anywhere."""

from twin.layer import MultiheadAttention, TransformerLayer
from twin.quantized import Quantized, prepare_for_saving, restore_from_saved

__all__ = ["MultiheadAttention", "Quantized", "TransformerLayer", "prepare_for_saving", "restore_from_saved"]
