"""Turn off what differs between the ranks, so that weights can be compared exactly (page 12)."""

from torch import nn


def exact(model):
    """Return the new model without the statistics of a batch and without dropout.

    Call it before you create the optimizer and wrap the model. Weights that were saved with
    BatchNorm don't fit afterwards.
    """
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            model.set_submodule(name, nn.GroupNorm(1, module.num_features, affine=module.affine))
        for option, value in vars(module).items():  # of dropout, attention, LSTMs and others
            if isinstance(value, float) and ("drop" in option or (option == "p" and value < 1)):
                setattr(module, option, 0.0)
    return model
