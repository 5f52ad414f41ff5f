"""LARS_PRESETS: variants of LARS in use, as options of hsgd.optim.LARS.

Each was read in the named implementation; none of its code is here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LARS_PRESETS"]

# SGD on a scaled gradient: the learning rate is outside of the buffer, no shape is excluded.
_AROUND_SGD: dict[str, Any] = {"lr_in_momentum": False, "exclude_1d": False}
_ONLY_DECAYED = {"adapt": "decayed", "zero_norm": "plain"}

LARS_PRESETS: dict[str, dict[str, Any]] = {
    # the defaults of hsgd.optim.LARS: the MLPerf form with an eps
    "default": {},
    # mlcommons/training, image_classification/tensorflow2/lars_optimizer.py
    "mlperf": {"eps": 0.0},
    # timm 1.0, timm/optim/lars.py; always_adapt=True there is adapt="always" here
    "timm": {**_AROUND_SGD, "adapt": "decayed", "momentum": 0.0},
    # NVIDIA apex, apex/parallel/LARC.py around torch.optim.SGD; clip=False there is
    # trust_clip=False here
    "apex_larc": {
        **_AROUND_SGD,
        "trust_coefficient": 0.02,
        "trust_clip": True,
        "zero_norm": "plain",
    },
    # lightning-bolts, pl_bolts/optimizers/lars.py
    "lightning_bolts": {**_AROUND_SGD, **_ONLY_DECAYED, "momentum": 0.0},
    # torch-optimizer 0.3, torch_optimizer/lars.py
    "torch_optimizer": {**_AROUND_SGD, **_ONLY_DECAYED, "momentum": 0.0, "trust_coefficient": 0.01},
    # google-research/simclr, lars_optimizer.py; classic_momentum=False there is norm_of="update"
    "simclr": {"eps": 0.0, "norm_of": "decayed"},
}
