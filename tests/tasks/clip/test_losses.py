"""InfoNCE and SigLIP's loss: against open_clip's, by hand, and in two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor

from multimodal.models.clip import CLIPOutput
from tasks.clip.losses import contrastive_loss, pair_loss, sigmoid_loss

SCALE, BIAS = torch.tensor(20.0), torch.tensor(-8.0)
ROOT = Path(__file__).resolve().parents[3]


def features(count: int = 6) -> tuple[Tensor, Tensor]:
    images, texts = (F.normalize(torch.randn(count, 5), dim=-1).requires_grad_() for _ in range(2))
    return images, texts


def test_as_open_clips() -> None:
    images, texts = features()
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE), ClipLoss()(images, texts, SCALE))
    torch.testing.assert_close(
        sigmoid_loss(images, texts, SCALE, BIAS), SigLipLoss()(images, texts, logit_scale=SCALE, logit_bias=BIAS)
    )


def test_several_right_ones_share_the_target() -> None:
    images, texts = features(3)
    right = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    logits = SCALE * images @ texts.T
    rows, columns = -logits.log_softmax(1), -logits.log_softmax(0)
    halves = (rows[:2, :2].mean() * 2 + rows[2, 2] + columns[:2, :2].mean() * 2 + columns[2, 2]) / 6
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, right), halves)
    signs = right.float() * 2 - 1
    by_pair = -F.logsigmoid(signs * (logits + BIAS)).sum() / 3
    torch.testing.assert_close(sigmoid_loss(images, texts, SCALE, BIAS, right), by_pair)


@pytest.mark.parametrize("local", [False, True])
def test_captions_of_one_image_and_equal_captions_are_right(local: bool) -> None:
    images, texts = features(4)
    image_id, caption_id = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 1])
    right = torch.eye(4, dtype=torch.bool)
    for i, j in ((0, 1), (1, 3)):
        right[i, j] = right[j, i] = True
    output = CLIPOutput(images, texts, SCALE, BIAS)
    for kind, expected in (
        ("infonce", contrastive_loss(images, texts, SCALE, right)),
        ("sigmoid", sigmoid_loss(images, texts, SCALE, BIAS, right)),
    ):
        torch.testing.assert_close(pair_loss(output, image_id, caption_id, kind=kind, local=local), expected)


@pytest.mark.parametrize("loss", [contrastive_loss, sigmoid_loss])
def test_in_float32_under_autocast(loss: object) -> None:
    assert callable(loss)
    images, texts = features()
    expected = loss(images.bfloat16().float(), texts.bfloat16().float(), SCALE)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(images.bfloat16(), texts.bfloat16(), SCALE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Loss and gradients of the whole batch, gathered and local, under DDP's mean."""
    out = tmp_path / "errors"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    subprocess.run(
        [sys.executable, *command, "tests.tasks.clip.two_losses", str(out)],
        cwd=ROOT, check=True, capture_output=True, timeout=200,
    )  # fmt: skip
    lines = [line.split() for line in out.read_text().splitlines()]
    assert [line[:2] for line in lines] == [[k, x] for k in ("infonce", "sigmoid") for x in ("False", "True")]
    assert all(float(error) <= 1e-6 for *_, error in lines), lines
