"""DFlash's model: the plain block backbone in Qwen3's style, whatever the target is."""

from __future__ import annotations

from mlx_dspark.catalog.formats import DrafterConfig
from mlx_dspark.drafters.layers import attentions
from mlx_dspark.nn.block import BlockBackbone, BlockLayer


class DFlashModel(BlockBackbone):
    """No tables and no heads of its own."""

    def __init__(self, config: DrafterConfig, window: int) -> None:
        layers = [BlockLayer(attention, config.intermediate) for attention in attentions(config, window)]
        super().__init__(layers, len(config.taps))
