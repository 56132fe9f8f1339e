"""Tiny random DETRs, Hugging Face's and ours, and padded batches, for the comparisons of several files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.blocks import StackConfig
from multimodal.models.detr import DETR, LAYERS, DETRConfig

SMALL: dict[str, Any] = {
    "num_queries": 7,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_labels": 5,
    "auxiliary_loss": False,
}


def build(backbone: str = "test_resnet", **options: Any) -> Any:
    """A `DetrForObjectDetection`, no weight or statistic of which is a special number such as 0 or 1."""
    import transformers

    own = {} if "backbone_config" in options else {"use_timm_backbone": True, "backbone": backbone}
    model = transformers.DetrForObjectDetection(transformers.DetrConfig(**(SMALL | own | options)))
    model.set_attn_implementation("eager")
    randomize(model)
    return model.eval()


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Move weights and statistics off their initial values, and so far that queries and places come to differ."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.add_(torch.randn_like(tensor) * (0.05 if tensor.dim() != 2 else 2 * tensor.shape[1] ** -0.5))
    for name, tensor in module.named_buffers():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)


def padded_batch() -> tuple[Tensor, Tensor]:
    """Images [3, 3, 96, 128] of three sizes, zero on the padding, and which pixels are real, bool [3, 96, 128]."""
    valid = torch.zeros(3, 96, 128, dtype=torch.bool)
    for mask, (height, width) in zip(valid, ((96, 70), (64, 128), (50, 33)), strict=True):
        mask[:height, :width] = True
    return torch.randn(3, 3, 96, 128) * valid[:, None], valid


def tokens_of(blocks: Any) -> list[Tensor]:
    """A list that fills with what each block returns at the next call."""
    found: list[Tensor] = []
    for block in blocks:
        block.register_forward_hook(lambda *call: found.append(call[-1].tokens))
    return found


def save(module: nn.Module, folder: Path) -> Path:
    module.save_pretrained(folder)  # type: ignore[operator]
    return folder


def tiny(**changes: Any) -> DETR:
    """Ours; `encoder` and `decoder` are changes of these."""
    stack = StackConfig(**(LAYERS | {"embed_dim": 32, "depth": 1, "mlp_ratio": 2.0}))
    sides = {"encoder": replace(stack, final_norm=False), "decoder": stack}
    sides = {side: replace(one, **changes.pop(side, {})) for side, one in sides.items()}
    return DETR(DETRConfig(**({"num_classes": 2, "num_queries": 3, "backbone": "test_resnet"} | sides | changes)))
