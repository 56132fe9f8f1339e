"""Published weights of a convolutional backbone alone, under timm's names."""

import os
from pathlib import Path

from torch import Tensor

from multimodal.blocks.backbone import ConvStem, TimmBackbone
from multimodal.pretrained.files import one_line, read_weights
from multimodal.pretrained.keymap import check_keys

DOWNLOADED = "timm"
"""The source that stands for the weights that timm itself downloads."""


def load_backbone(backbone: TimmBackbone | ConvStem, source: str | os.PathLike[str]) -> None:
    """Load a backbone's weights; what the source has beyond it, such as a classifier, is left out.

    Args:
        backbone: what to fill.
        source: a file of weights under timm's names, or `timm`.

    Raises:
        ValueError: the file cannot be read or lacks weights, timm cannot download them, or the backbone is none of its.
    """
    if isinstance(backbone, ConvStem):
        raise ValueError(
            f"{source}: the backbone is 'conv', for which no weights are published, expected one of timm's"
        )
    expected = backbone.net.state_dict()
    if source == DOWNLOADED:
        state = _download(backbone.name)
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise ValueError(f"{source}: no such file, expected weights of {backbone.name}, or {DOWNLOADED}")
        state = read_weights(path)
    state = {name: value for name, value in state.items() if name in expected}
    check_keys(state, expected, f"{source}, for the backbone {backbone.name}")
    backbone.net.load_state_dict(state)


def _download(name: str) -> dict[str, Tensor]:
    import timm

    try:
        state: dict[str, Tensor] = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # timm and the hub raise as many kinds as there are ways to fail
        raise ValueError(f"{DOWNLOADED}: no weights of {name} ({one_line(error)})") from error
    return state
