"""A checkpoint as a folder of Hugging Face's, with what its generation has to know of tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained import Checkpoint
from multimodal.pretrained.hf_whisper import to_hf


def write_folder(checkpoint: Checkpoint, out: Path) -> None:
    """Write a folder that `WhisperForConditionalGeneration.from_pretrained` and `ct2-transformers-converter` take.

    Raises:
        ValueError: the model has something that HF's does not have, or its tokenizer is not to be had.
    """
    if checkpoint.tokenizer is None:
        to_hf(checkpoint, out)
        return
    tokenizer = SpeechTokenizer.from_record(checkpoint.tokenizer)
    whole = replace(checkpoint, tokenizer=tokenizer.to_dict())
    to_hf(whole, out, generation_config(tokenizer))


def generation_config(tokenizer: SpeechTokenizer) -> dict[str, Any]:
    """generation_config.json but for what follows from the model."""
    says: dict[str, Any] = {
        "bos_token_id": tokenizer.end,
        "eos_token_id": tokenizer.end,
        "pad_token_id": tokenizer.end,
        "decoder_start_token_id": tokenizer.start,
        "prev_sot_token_id": tokenizer.previous,
        "no_timestamps_token_id": tokenizer.no_timestamps,
        "suppress_tokens": sorted({*tokenizer.not_spoken, *tokenizer.only_in_prompts}),
        "begin_suppress_tokens": [*tokenizer.blank, tokenizer.end],
        "max_initial_timestamp_index": 50,
        "is_multilingual": tokenizer.multilingual,
        "return_timestamps": False,
    }
    if tokenizer.multilingual:
        says["lang_to_id"] = {f"<|{code}|>": token for code, token in tokenizer.languages.items()}
        says["task_to_id"] = {"transcribe": tokenizer.transcribe, "translate": tokenizer.translate}
    return says
