"""The small transformer of page 42."""

import copy

from torch import nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    """Layers of a transformer, for input of shape [batch, tokens, width]."""

    def __init__(self, layers: int, width: int, checkpointing: bool = False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.checkpointing = checkpointing

    def forward(self, inputs):
        for layer in self.layers:
            if self.checkpointing:  # keep only the layer's input, and compute the rest again
                inputs = checkpoint(layer, inputs, use_reentrant=False)
            else:
                inputs = layer(inputs)
        return inputs
