"""Episodes as a film."""

from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np

from multimodal.models.decision_transformer import DecisionTransformerConfig
from multimodal.pretrained.files import write_whole
from tasks.dt.environment import Environment, make, roll_out
from tasks.dt.policy import Policy
from tasks.errors import one_line


class Film:
    """An environment that draws itself; ValueError where it cannot, or not on this machine.

    Args:
        name: gymnasium's name of the environment.
        config: of the model that will act in it.
    """

    def __init__(self, name: str, config: DecisionTransformerConfig) -> None:
        self.environment = make(name, config, render_mode="rgb_array")
        self.frames: list[np.ndarray] = []
        self.environment.reset(seed=0)
        try:
            self._shoot(self.environment)
        except Exception as error:  # as many kinds as there are ways to draw
            raise ValueError(f"--video: environment {name!r} cannot be drawn here ({one_line(error)})") from error

    def _shoot(self, environment: Environment) -> None:
        frame = np.asarray(environment.render())
        if frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a picture of shape {frame.shape}, expected [H, W, 3]")
        self.frames.append(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])  # the codec wants even sides

    def save(self, path: Path, policy: Policy, targets: Sequence[float | None], seed: int) -> None:
        """An episode for each target in turn, as MP4 (H.264)."""
        self.frames.clear()
        for target in targets:
            roll_out(policy, [self.environment], None if target is None else [target], [seed], watch=self._shoot)
        content = BytesIO()
        rate = Fraction(round(self.environment.metadata.get("render_fps", 30)))
        with av.open(content, "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=rate)
            stream.height, stream.width = self.frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
            for frame in self.frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
        write_whole(path, content.getbuffer())
