"""Published Whispers of the same size, with our weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.data.audio import SAMPLE_RATE, LogMel
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.models.whisper import WhisperConfig
from multimodal.pretrained.openai_whisper import to_openai
from multimodal.pretrained.published_whisper import is_multilingual
from multimodal.pretrained.record import template
from tasks.peers import Attention, exported, from_pretrained, peer
from tasks.whisper.data import IGNORED
from tasks.whisper.huggingface import write_folder
from tasks.workload import Data, Peer, Setting, Subject, Workload

MELS = (80, 128)
"""Channels of the published models' spectrograms."""


def peers(work: Workload, setting: Setting) -> list[Peer]:
    """Attention is fused in all of them: at 1,500 tokens it wins everywhere."""
    if work.name == "log-mel":
        return _spectrograms(work)
    config: WhisperConfig = work.config

    def openai(model: Any, data: Data) -> Any:
        return _openai_work(model, data, work)

    def hugging_face(model: Any, data: Data) -> Any:
        return _hugging_face_work(model, data, work)

    decodes = "tokens" in work.facts
    parts = [""] if work.trains else ["model.encoder", *([""] if decodes else [])]
    found = [
        peer(
            "openai-whisper", "openai-whisper", work, setting, lambda _: _openai(config), openai, ("fused",),
            called=["" if work.trains else "encoder"],  # its decoder is changed by hooks in each decoding
            compiled="encoder compiled" if decodes else "compiled",
        ),
        peer(
            "Hugging Face", "transformers", work, setting, lambda kind: _hugging_face(config, kind), hugging_face,
            ("fused",), called=parts, compiled="static cache, compiled" if decodes else "compiled",
        ),
    ]  # fmt: skip
    return found if work.trains else [*found, *_faster_whisper(work, setting)]


@cache
def _tokenizer(vocab_size: int) -> dict[str, Any]:
    multilingual = is_multilingual(vocab_size)
    languages = vocab_size - 51765 - multilingual
    if languages not in (99, 100):
        raise ValueError(f"vocab_size {vocab_size} is none of the published ones")
    return SpeechTokenizer.from_openai(multilingual=multilingual, num_languages=languages).to_dict()


def _exported(config: WhisperConfig, read: Callable[[Path], Any]) -> Any:
    """By way of a folder of Hugging Face's."""
    return exported("whisper", config, write_folder, read, tokenizer=_tokenizer(config.vocab_size))


# ----------------------------------------------------------------------------------------------------- openai-whisper


def _openai(config: WhisperConfig) -> nn.Module:
    import whisper

    def read(path: Path) -> nn.Module:
        return whisper.load_model(str(path), device="cpu")

    model: nn.Module = exported("whisper", config, to_openai, read, suffix=".pt")
    return model


def _openai_work(model: Any, data: Data, work: Workload) -> Any:
    import whisper

    if work.trains:
        return _loss(model(data["mel"], data["tokens"]), data)
    if "tokens" not in work.facts:
        return model.encoder(data["mel"])
    if data["mel"].dtype == torch.bfloat16:
        raise ValueError("openai-whisper decodes in float32 or float16")
    options = whisper.DecodingOptions(
        language="en",
        without_timestamps=True,
        sample_len=work.facts["tokens"],
        suppress_tokens=[work.facts["end"]],
        suppress_blank=False,
        fp16=data["mel"].dtype == torch.float16,
    )
    return [one.tokens for one in whisper.decode(model, data["mel"], options)]


# ------------------------------------------------------------------------------------------------------- Hugging Face


def _hugging_face(config: WhisperConfig, kind: Attention) -> nn.Module:
    from transformers import WhisperForConditionalGeneration

    model: nn.Module = _exported(config, lambda out: from_pretrained(WhisperForConditionalGeneration, out, kind))
    return model


def _hugging_face_work(model: Any, data: Data, work: Workload) -> Any:
    if work.trains:
        found = model(input_features=data["mel"], decoder_input_ids=data["tokens"], use_cache=False)
        return _loss(found.logits, data)
    if "tokens" not in work.facts:
        return model.model.encoder(data["mel"]).last_hidden_state
    count = work.facts["tokens"]
    # Of one shape in every step: what compilation needs, and what is slower without it.
    static = {"cache_implementation": "static"} if model._compiled_call_impl is not None else {}
    found = model.generate(
        data["mel"],
        language="en",  # else it is detected, by an encoder's pass of its own
        task="transcribe",
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **static,
    )
    return found[:, -count:].tolist()


def _loss(logits: Tensor, data: Data) -> Tensor:
    return F.cross_entropy(logits.float().transpose(1, 2), data["labels"], ignore_index=IGNORED)


# ----------------------------------------------------------------------------------------------------- faster-whisper


def _faster_whisper(work: Workload, setting: Setting) -> list[Peer]:
    """In the setting's dtype, on a CPU in float32, and in 8 bits: two peers, since both are told of."""
    full = "float32" if setting.device.type == "cpu" else str(setting.dtype).removeprefix("torch.")

    def of(name: str, kind: str) -> Peer:
        def form(data: Data) -> Subject:
            return _ctranslate(work, setting, data, kind)

        return Peer(name=name, package="faster-whisper", forms={kind: form})

    return [of("faster-whisper", full), of("faster-whisper, int8", "int8")]


def _ctranslate(work: Workload, setting: Setting, data: Data, kind: str) -> Subject:
    from ctranslate2 import StorageView
    from ctranslate2.converters import TransformersConverter
    from faster_whisper import WhisperModel

    def read(folder: Path) -> Any:
        with TemporaryDirectory() as out:
            TransformersConverter(str(folder), copy_files=["tokenizer.json"]).convert(out, force=True)
            threads = torch.get_num_threads()
            return WhisperModel(out, device=setting.device.type, compute_type=kind, cpu_threads=threads).model

    config: WhisperConfig = work.config
    model = _exported(config, read)
    features = StorageView.from_array(data["mel"].float().cpu().numpy())

    def encode() -> Any:
        return model.encode(features, to_cpu=False)

    def decode() -> list[list[int]]:
        count = work.facts["tokens"]
        prompts = [list(work.facts["prompt"])] * len(data["mel"])
        # Of `max_length` it generates at most the half.
        options = {"max_length": 2 * count, "suppress_blank": False, "suppress_tokens": [work.facts["end"]]}
        return [one.sequences_ids[0] for one in model.generate(features, prompts, beam_size=1, **options)]

    count = sum(weight.numel() for name, weight in template("whisper", config).items() if name != "audio_positions")
    return Subject(run=decode if "tokens" in work.facts else encode, model=None, parameters=count)


# ------------------------------------------------------------------------------------------------------- spectrograms


def _spectrograms(work: Workload) -> list[Peer]:
    """Of the published sizes alone, as the packages compute them; torchaudio's is scaled in the same way."""
    channels = work.config.num_mels
    if channels not in MELS:
        return []

    def torchaudio(data: Data) -> Subject:
        from torchaudio.transforms import MelSpectrogram

        mel = LogMel(num_mels=channels)
        sizes = {"n_fft": mel.fft_size, "hop_length": mel.hop_length, "n_mels": channels}
        power = MelSpectrogram(SAMPLE_RATE, **sizes, norm="slaney", mel_scale="slaney").to(data["samples"].device)

        def run() -> Tensor:
            log: Tensor = power(data["samples"])[..., :-1].clamp(min=1e-10).log10()
            return (torch.maximum(log, log.max() - 8) + 4) / 4

        return Subject(run=run, model=None)

    def openai(data: Data) -> Subject:
        from whisper import log_mel_spectrogram

        return Subject(run=lambda: log_mel_spectrogram(data["samples"], channels), model=None)

    def hugging_face(data: Data) -> Subject:
        from transformers import WhisperFeatureExtractor

        extract, samples = WhisperFeatureExtractor(feature_size=channels), _numpy(data)
        options: dict[str, Any] = {
            "sampling_rate": SAMPLE_RATE,
            "return_tensors": "pt",
            "device": str(data["samples"].device),
        }
        return Subject(run=lambda: extract(samples, **options).input_features[0], model=None)

    def faster_whisper(data: Data) -> Subject:
        from faster_whisper.feature_extractor import FeatureExtractor

        extract, samples = FeatureExtractor(feature_size=channels), _numpy(data)
        return Subject(run=lambda: extract(samples), model=None)

    return [
        Peer(name="torchaudio", package="torchaudio", forms={"its MelSpectrogram": torchaudio}),
        Peer(name="openai-whisper", package="openai-whisper", forms={"log_mel_spectrogram": openai}),
        Peer(name="Hugging Face", package="transformers", forms={"WhisperFeatureExtractor": hugging_face}),
        Peer(name="faster-whisper", package="faster-whisper", forms={"FeatureExtractor": faster_whisper}),
    ]


def _numpy(data: Data) -> np.ndarray:
    samples: np.ndarray = data["samples"].cpu().numpy()
    return samples
