"""The Lightning module of speech recognition.

B batch, A audio tokens, N text tokens, V vocabulary
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss
from torchmetrics import MeanMetric, Metric, MetricCollection

from multimodal.generate import generate
from multimodal.models.whisper import Whisper, WhisperConfig
from multimodal.pretrained import Checkpoint, load_weights
from tasks.base import Batch, TaskModule, masked_mean
from tasks.whisper.data import IGNORED, SpeechData
from tasks.whisper.metrics import ErrorRates, Normalization
from tasks.whisper.rules import Suppress

_POSITIONS = "audio_positions"


class WhisperModule(TaskModule):
    """A Whisper that learns to write down what it hears."""

    task = "whisper"
    model: Whisper

    def build(
        self,
        *,
        label_smoothing: float = 0.0,
        normalize: Normalization = "none",
        **model: Any,
    ) -> Whisper:
        """The model.

        Args:
            label_smoothing: Share of each target that is spread over all tokens.
            normalize: What is done to texts before errors are counted: none; basic, for any language; english, as the
                figures of the paper are counted.
        """
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}, expected a share in [0, 1)")
        self.label_smoothing = label_smoothing
        self.normalize: Normalization = normalize
        return Whisper(WhisperConfig(**model))

    def loss(self, batch: Batch) -> Tensor:
        inputs = self._mel(batch), batch["tokens"], self._audio_mask(batch)
        counted, share = batch["labels"] != IGNORED, self.model.config.ctc_weight
        if not share:
            return masked_mean(self._losses(self.model(*inputs), batch), counted)
        found = self.model(*inputs, need_heard=True)
        loss = masked_mean(self._losses(found.logits, batch), counted)
        return (1 - share) * loss + share * self._ctc(found.heard, batch)

    def _losses(self, logits: Tensor, batch: Batch, *, smoothed: bool = True) -> Tensor:
        """Of each token, [B, N]."""
        smoothing = self.label_smoothing if smoothed else 0.0
        return cross_entropy(
            logits.float().transpose(1, 2),
            batch["labels"],
            ignore_index=IGNORED,
            label_smoothing=smoothing,
            reduction="none",
        )

    def _ctc(self, heard: Tensor, batch: Batch) -> Tensor:
        """CTC's loss over the number of tokens of a text, the mean over texts; the token that ends one is the blank.

        Attention learns from it sooner where to look ("Joint CTC-Attention based End-to-End Speech Recognition using
        Multi-task Learning", Kim et al. 2017).
        """
        labels = batch["labels"]
        end = int(labels[0][labels[0] != IGNORED][-1])
        is_text = (labels != IGNORED) & (labels != end)
        lengths = is_text.sum(dim=1)
        order = (~is_text).long().argsort(dim=1, stable=True)  # the text first
        losses = ctc_loss(
            heard.float().log_softmax(-1).transpose(0, 1),
            labels.gather(1, order).clamp(min=0),
            batch["audio_length"],
            lengths,
            blank=end,
            reduction="none",
            zero_infinity=True,
        )
        return (losses / lengths.clamp(min=1)).mean()

    def _mel(self, batch: Batch) -> Tensor:
        return batch["mel"].to(self.model.embed.weight.dtype)

    def _audio_mask(self, batch: Batch) -> Tensor | None:
        """Which audio tokens are sound, bool [B, A]; None where the model is to look at all of them."""
        if not self.model.config.mask_padding:
            return None
        tokens = torch.arange(batch["mel"].shape[2] // self.model.config.stem_stride, device=self.device)
        return tokens < batch["audio_length"][:, None]

    def metrics_of(self) -> dict[str, Metric]:
        return {"loss": MeanMetric(nan_strategy="disable"), "errors": ErrorRates(self.normalize)}

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        mask = self._audio_mask(batch)
        audio = self.model.encode(self._mel(batch), mask)
        losses = self._losses(self.model.decode(batch["tokens"], audio, audio_mask=mask), batch, smoothed=False)
        metrics["loss"].update(losses[batch["labels"] != IGNORED])
        references = ["".join(chr(one) for one in row if one != IGNORED) for row in batch["text"].tolist()]
        metrics["errors"].update(self._written(audio, mask, batch), references)

    def _written(self, audio: Tensor, mask: Tensor | None, batch: Batch) -> list[str]:
        """What the most likely tokens say."""
        data: SpeechData = self.trainer.datamodule  # type: ignore[attr-defined]
        tokenizer, prompt, config = data.tokenizer, data.prompt, self.model.config
        room = config.text_context - len(prompt)
        cache = self.model.make_cache()
        tokens = torch.tensor([prompt], device=self.device).expand(len(audio), -1)
        logits = self.model.decode(tokens, audio, audio_mask=mask, cache=cache, only=slice(-1, None))[:, -1]
        logits = self.model.begin(logits, audio, cache, blank=tokenizer.end)
        rule = Suppress(range(tokenizer.end + 1, config.vocab_size))
        # Nothing is said in more tokens than there are of sound.
        limits = batch["audio_length"].clamp(max=max(room, 1))
        found = generate(self.model.step, cache, logits, end=tokenizer.end, limits=limits, rules=[rule])
        return [tokenizer.decode(one.tokens).strip() for one in found]

    def load_pretrained(self, checkpoint: Checkpoint, where: str, labels: list[str] | None = None) -> None:
        """Load the weights; of a longer window the first positions."""
        state, length = dict(checkpoint.state_dict), self.model.config.audio_context
        if _POSITIONS in state:
            state[_POSITIONS] = state[_POSITIONS][:length]
        load_weights(self.model, state, where)
