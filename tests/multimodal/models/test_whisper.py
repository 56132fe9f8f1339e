"""Whisper: its config, padded prompts, selected positions; what published code has is compared in `tests/parity`."""

import re
from typing import Any

import pytest
import torch

from multimodal.blocks import StackConfig
from multimodal.ctc import CTCPrefix
from multimodal.models.whisper import Whisper, WhisperConfig
from tests.parity.keys import assert_close, randomize

STACK = StackConfig(embed_dim=16, depth=2, num_heads=2)
TINY: dict[str, Any] = {"num_mels": 8, "audio_context": 12, "text_context": 10, "vocab_size": 30}


def build(**options: Any) -> Whisper:
    model = Whisper(WhisperConfig(**(TINY | {"encoder": STACK, "decoder": STACK} | options)))
    randomize(model)
    return model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_mels": 0}, "num_mels is 0, expected at least 1"),
        ({"text_context": 0}, "text_context is 0, expected at least 1"),
        ({"stem_stride": 0}, "stem_stride is 0, expected at least 1"),
        ({"ctc_weight": 1.0}, "ctc_weight is 1.0, expected a share in [0, 1)"),
        (
            {"ctc_weight": 0.3, "encoder": StackConfig(embed_dim=8, num_heads=2)},
            "ctc_weight is 0.3, but encoder and decoder are (8, 16) wide: expected one width",
        ),
        ({"stem_kernels": (3, 4)}, "stem_kernels is (3, 4), expected odd numbers"),
        ({"encoder": StackConfig(embed_dim=15, num_heads=3)}, "encoder.embed_dim is 15, expected an even number"),
        (
            {"alignment_heads": ((2, 0),)},
            "alignment_heads has (2, 0), expected a layer below 2 and a head below 2",
        ),
    ],
)
def test_a_config_that_cannot_be_is_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        WhisperConfig(**(TINY | {"encoder": STACK, "decoder": STACK} | options))


def test_the_default_is_the_published_tiny() -> None:
    with torch.device("meta"):
        model = Whisper(WhisperConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 37_184_640


@pytest.mark.parametrize("frames", [24, 15, 1])
def test_shorter_sound_is_taken_as_it_is(frames: int) -> None:
    assert build().encode(torch.randn(2, 8, frames)).shape == (2, -(-frames // 2), 16)


@pytest.mark.parametrize("shape", [(2, 8, 25), (2, 7, 24), (8, 24)])
def test_other_spectrograms_are_refused(shape: tuple[int, ...]) -> None:
    expected = re.escape(f"spectrograms have shape {list(shape)}, expected [B, 8, at most 24]")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        build().encode(torch.randn(shape))


@torch.no_grad()
def test_prompts_of_several_lengths_are_as_each_alone() -> None:
    model, lengths = build(), (3, 5, 1)
    audio = model.encode(torch.randn(3, 8, 20))
    prompts = [torch.randint(30, (1, length)) for length in lengths]
    following = torch.randint(30, (3, 4))
    padding = torch.tensor([max(lengths) - length for length in lengths])
    padded = torch.cat([torch.nn.functional.pad(one, (max(lengths) - one.shape[1], 0)) for one in prompts])
    cache = model.make_cache(max(lengths) + 4, padding=padding)
    first = model.decode(padded, audio, cache=cache, only=slice(-1, None))
    one, rest = model.decode(following[:, :1], cache=cache), model.decode(following[:, 1:], cache=cache)
    for row, prompt in enumerate(prompts):
        alone = model.decode(torch.cat([prompt, following[row : row + 1]], dim=1), audio[row : row + 1])
        together = torch.cat([first[row], one[row], rest[row]])[None]
        assert_close(together, alone[:, prompt.shape[1] - 1 :])
    cache.reorder(torch.tensor([2, 0]))
    assert cache.padding is not None
    assert cache.padding.tolist() == [4, 2]


@torch.no_grad()
def test_selected_positions_of_each_row() -> None:
    model = build()
    mel, tokens = torch.randn(2, 8, 20), torch.randint(30, (2, 6))
    audio, every = model.encode(mel), model(mel, tokens)
    only = torch.tensor([[0, 5], [2, 3]])
    expected = torch.stack([every[row, at] for row, at in enumerate(only)])
    assert_close(model.decode(tokens, audio, only=only), expected)
    assert_close(model.decode(tokens, audio, cache=model.make_cache(), only=only), expected)


@torch.no_grad()
def test_the_context_may_stay_where_it_is() -> None:
    model = build()
    audio = model.encode(torch.randn(1, 8, 20))
    cache = model.make_cache()
    model.decode(torch.tensor([[1, 2]]), audio, cache=cache)
    cache.reorder(torch.tensor([0, 0]))
    model.decode(torch.tensor([[3], [4]]), cache=cache)
    context = cache.blocks[0].cross_attn
    assert context is not None
    before = context.keys
    cache.reorder(torch.tensor([1, 1]), context=False)
    assert context.keys is before
    logits = model.decode(torch.tensor([[5], [6]]), cache=cache)
    assert_close(logits[1:], model.decode(torch.tensor([[1, 2, 4, 6]]), audio)[:, -1:])


@torch.no_grad()
def test_cross_weights_of_the_chosen_heads() -> None:
    model = build(alignment_heads=((1, 1), (0, 0)))
    mel, tokens = torch.randn(2, 8, 20), torch.randint(30, (2, 6))
    audio = model.encode(mel)
    logits, weights = model.cross_weights(tokens, audio)
    assert_close(logits, model.decode(tokens, audio))
    assert weights.shape == (2, 2, 6, 10)
    assert_close(weights.sum(-1), torch.ones(2, 2, 6))


@pytest.mark.parametrize(("kernels", "stride"), [((3, 3), 2), ((5, 9), 2), ((5, 9), 3), ((5, 9), 4)])
@torch.no_grad()
def test_sounds_of_several_lengths_are_as_each_alone(kernels: tuple[int, int], stride: int) -> None:
    model, lengths = build(mask_padding=True, stem_kernels=kernels, stem_stride=stride), (7, 12, 1)
    mel, tokens = torch.randn(3, 8, 12 * stride), torch.randint(30, (3, 4))
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    mel = mel * mask.repeat_interleave(stride, dim=1)[:, None]
    both = model(mel, tokens, mask)
    cache = model.make_cache()
    audio = model.encode(mel, mask)
    first = model.decode(tokens[:, :2], audio, audio_mask=mask, cache=cache)
    cache.reorder(torch.tensor([2, 0]))
    second = model.decode(tokens[[2, 0], 2:], cache=cache)
    assert_close(first, both[:, :2])
    assert_close(second, both[[2, 0], 2:])
    for row, length in enumerate(lengths):
        alone = model(mel[row : row + 1, :, : stride * length], tokens[row : row + 1])
        assert_close(both[row : row + 1], alone)


def test_what_each_audio_token_says_by_itself() -> None:
    model = build()
    mel, tokens = torch.randn(2, 8, 24), torch.randint(30, (2, 4))
    found = model(mel, tokens, need_heard=True)
    assert_close(found.logits, model(mel, tokens))
    assert_close(found.heard, model.encode(mel) @ model.embed.weight.T)


@pytest.mark.parametrize("weight", [0.0, 0.4])
@torch.no_grad()
def test_the_encoder_has_its_share_in_what_follows(weight: float) -> None:
    model = build(ctc_weight=weight, mask_padding=True)
    mel, tokens = torch.randn(3, 8, 24), torch.tensor([[9, 3, 5], [9, 4, 4], [9, 7, 1]])
    mask = torch.arange(12) < torch.tensor([12, 12, 8])[:, None]
    audio, cache = model.encode(mel, mask), model.make_cache()
    logits = model.decode(tokens[:, :1], audio, audio_mask=mask, cache=cache)[:, -1]
    scores = [model.begin(logits, audio, cache, blank=2)]
    scores.append(model.step(tokens[:, 1:2], cache))
    kept = torch.tensor([2, 1])
    cache.reorder(kept)
    scores.append(model.step(tokens[kept, 2:], cache))
    for count, found, rows in ((0, scores[0], range(3)), (1, scores[1], range(3)), (2, scores[2], kept.tolist())):
        for row, score in zip(rows, found, strict=True):
            length = int(mask[row].sum())
            alone = audio[row : row + 1, :length]
            expected = model.decode(tokens[row : row + 1, : count + 1], alone)[:, -1].log_softmax(-1)
            heard = CTCPrefix(model.hear(alone), 2)
            for token in tokens[row, 1 : count + 1]:
                heard.append(token[None])
            joint = (1 - weight) * expected + weight * heard.scores()
            assert_close(score.log_softmax(-1)[None], joint.log_softmax(-1))
