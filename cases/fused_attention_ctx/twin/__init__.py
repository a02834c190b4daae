"""TransformerEngine's way of saving quantised tensors, in pure torch, so that the case runs anywhere."""

from twin.layer import MultiheadAttention, TransformerLayer
from twin.quantised import Quantised, prepare_for_saving, restore_from_saved

__all__ = ["MultiheadAttention", "Quantised", "TransformerLayer", "prepare_for_saving", "restore_from_saved"]
