"""A folder with images, a model and an empty cache."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multimodal import pretrained
from tests.tasks.clip.tiny_clip import checkpoint


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Five images in photos/, model.safetensors, and all that is kept in multimodal/clip/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("photos").mkdir()
    rng = np.random.default_rng(0)
    for at in range(5):
        coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(coarse).resize((40, 30), Image.Resampling.NEAREST).save(f"photos/{at}.png")
    pretrained.save("model.safetensors", checkpoint())
    return [f"photos/{at}.png" for at in range(5)]
