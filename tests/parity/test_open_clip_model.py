"""Whole CLIPs against open_clip's, weights in and out; OpenAI's state dict has the same names."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import CLIP as TheirCLIP
from open_clip.model import CustomTextCLIP, build_model_from_openai_state_dict, set_model_preprocess_cfg
from safetensors.torch import load_file, save_file
from torch import nn

from multimodal.data import CLIPTokenizer
from multimodal.models.clip import CLIP
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.open_clip import CONFIG
from multimodal.pretrained.open_clip_folder import to_open_clip
from tests.parity.clip import END, LENGTH, VOCAB, assert_logits, batch, randomize, tiny
from tests.parity.keys import assert_close, assert_same_initialisation, gradients

PREPROCESS = {
    "size": [16, 16],
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "crop_mode": "squash",
}


def model_cfg(**changes: Any) -> dict[str, Any]:
    """A config of open_clip's; `vision_cfg` and `text_cfg` are changes of these."""
    vision = {"image_size": 16, "patch_size": 4, "width": 32, "head_width": 16, "layers": 2}
    text = {"context_length": LENGTH, "vocab_size": VOCAB, "width": 24, "heads": 2, "layers": 2}
    towers = {"vision_cfg": vision | changes.pop("vision_cfg", {}), "text_cfg": text | changes.pop("text_cfg", {})}
    return {"embed_dim": 20, **towers, **changes}


def build(custom: bool = False, **changes: Any) -> Any:
    return randomize((CustomTextCLIP if custom else TheirCLIP)(**model_cfg(**changes)))


def openai_cfg() -> dict[str, Any]:
    """Heads as wide as OpenAI's."""
    return {"vision_cfg": {"width": 128, "head_width": 64}, "text_cfg": {"width": 64, "heads": 1}}


def openai_model(state: dict[str, torch.Tensor]) -> Any:
    """What OpenAI's code makes of a state dict, in float32; its own builder rounds to float16."""
    module = build_model_from_openai_state_dict(dict(state)).float()
    module.load_state_dict(state)
    return module.eval()


@torch.no_grad()
def assert_same(ours: Any, theirs: Any, end: int = END) -> None:
    """Both towers, with and without their lengths, and the logits."""
    images, tokens = batch(end)
    assert isinstance(ours, CLIP)
    for normalize in (False, True):
        assert_close(ours.encode_image(images, normalize=normalize), theirs.encode_image(images, normalize=normalize))
        assert_close(ours.encode_text(tokens, normalize=normalize), theirs.encode_text(tokens, normalize=normalize))
    assert_logits(ours(images, tokens), theirs.get_logits(images, tokens)[0])


def fails(source: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------- in memory

EPS = {"norm_kwargs": {"eps": 1e-4}}
CASES: list[dict[str, Any]] = [
    {},
    {"quick_gelu": True},
    {"custom": True, "init_logit_bias": -3.0, "nonscalar_logit_scale": True},
    {"vision_cfg": {"image_size": (16, 8), "patch_size": (4, 2), "act_kwargs": {"approximate": "tanh"}}},
    {"vision_cfg": {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True, "mlp_ratio": 3.1}},
    {"vision_cfg": {"pool_type": "avg", "ls_init_value": 0.3}, "text_cfg": {"ls_init_value": 0.2}},
    {"text_cfg": {"pool_type": "eos", "eos_id": 40, **EPS}, "vision_cfg": EPS},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_from_memory(changes: dict[str, Any]) -> None:
    module = build(**changes)
    loaded = load(module, task="clip")
    size = changes.get("vision_cfg", {}).get("image_size", (16, 16))
    images, tokens = torch.randn(3, 3, *size), batch(changes.get("text_cfg", {}).get("eos_id", END))[1]
    with torch.no_grad():
        assert_close(loaded.model.encode_image(images, normalize=False), module.encode_image(images))
        assert_close(loaded.model.encode_text(tokens, normalize=False), module.encode_text(tokens))
        assert_logits(loaded.model(images, tokens), module.get_logits(images, tokens)[0])
    quick = changes.get("quick_gelu", False)
    assert (loaded.config["text"]["activation"] == "quick_gelu") is quick
    assert (loaded.config["logit_bias"] is None) is ("init_logit_bias" not in changes)
    assert (loaded.preprocess, loaded.tokenizer) == (None, None)


def test_gradients() -> None:
    module = build()
    ours, (images, tokens) = load(module).model.train(), batch()
    out = ours(images, tokens)
    (out.logit_scale * out.image_features @ out.text_features.T).cos().sum().backward()
    module.get_logits(images, tokens)[0].cos().sum().backward()
    found = {name: p.grad for name, p in ours.named_parameters()}
    expected = load(module).model.state_dict()
    for name, gradient in read_gradients(module).items():
        assert_close(found[name].reshape(expected[name].shape), gradient)


def read_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a module of open_clip under our names."""
    table = gradients(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(table[name])
    return read(module).state_dict


def test_initialisation() -> None:
    """All but the image tower's blocks, which open_clip leaves as torch draws them."""
    wide = {"width": 256, "layers": 2}
    module = TheirCLIP(**model_cfg(embed_dim=128, vision_cfg=wide | {"head_width": 64}, text_cfg=wide | {"heads": 4}))
    theirs, ours = read(module).state_dict, CLIP(load(module).model.config).state_dict()
    torch.testing.assert_close(theirs.pop("logit_scale"), ours["logit_scale"])
    names = {name: name.replace(".", "/") for name in theirs if not name.startswith(("vision.encoder", "vision.patch"))}
    drawn = nn.ParameterDict({key: ours[name].squeeze() for name, key in names.items()})
    assert_same_initialisation(drawn, {key: theirs[name].squeeze() for name, key in names.items()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_cfg": {"layers": (1, 1, 1, 1), "width": 8}}, "its image tower is ModifiedResNet"),
        ({"vision_cfg": {"attentional_pool": True, "attn_pooler_heads": 2}}, "its image tower pools by attention"),
        ({"vision_cfg": {"pos_embed_type": "sin_cos_2d"}}, "the positions of its patches are fixed"),
        ({"vision_cfg": {"qk_norm": True}}, "its blocks are CustomResidualAttentionBlock"),
        ({"text_cfg": {"norm_kwargs": {"eps": 1e-3}}}, "its norms are [('LayerNorm', 1e-05), ('LayerNorm', 0.001)]"),
        ({"text_cfg": {"pool_type": "last"}}, "its text tower pools by 'last'"),
        ({"text_cfg": {"no_causal_mask": True}, "custom": True}, "its text tower is not causal"),
        ({"text_cfg": {"embed_cls": True}, "custom": True}, "its text tower has a class token"),
        ({"text_cfg": {"proj_bias": True}}, "its text projection has a bias"),
    ],
    ids=str,
)
def test_what_is_not_covered_is_refused(changes: dict[str, Any], reason: str) -> None:
    module = (CustomTextCLIP if changes.pop("custom", False) else TheirCLIP)(**model_cfg(**changes))
    assert f"not covered, because {reason}; expected a CLIP of two plain Transformers" in fails(module)


# -------------------------------------------------------------------------------------------------- folders, in and out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision": {"activation": "quick_gelu"}, "text": {"activation": "quick_gelu"}, "logit_bias": -4.0},
        {"vision": {"pool": "mean", "pool_norm": True, "pre_norm": False}, "text": {"end_token": 40}},
        {"vision": {"mlp_ratio": 3.1, "layer_scale": 0.1}, "text": {"activation": "gelu_tanh", "mlp_ratio": 49 / 24}},
    ],
    ids=str,
)
def test_a_folder_goes_out_and_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    ours = randomize(tiny(**changes))
    checkpoint = Checkpoint.of("clip", ours, preprocess=PREPROCESS)
    to_open_clip(checkpoint, tmp_path)
    theirs = open_clip.create_model(f"local-dir:{tmp_path}", require_pretrained=True).eval()
    assert_same(ours, theirs, changes.get("text", {}).get("end_token", END))
    assert theirs.visual.preprocess_cfg["mean"] == PREPROCESS["mean"]
    again = read(tmp_path)
    assert again.preprocess == PREPROCESS
    assert all(torch.equal(again.state_dict[key], tensor) for key, tensor in checkpoint.state_dict.items())
    assert_same(load(tmp_path).model, theirs, changes.get("text", {}).get("end_token", END))
    to_open_clip(again, tmp_path / "again")
    first, second = (load_file(folder / "open_clip_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_tokenizer_comes_with_its_vocabulary(tmp_path: Path) -> None:
    ours = tiny(text={"vocab_size": 49408, "end_token": 49407})
    to_open_clip(Checkpoint.of("clip", ours), tmp_path)
    assert read(tmp_path).tokenizer == CLIPTokenizer(LENGTH).to_dict()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    theirs = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    texts = ["a red car", ""]
    with torch.no_grad():
        assert_close(ours.encode_text(CLIPTokenizer(LENGTH)(texts)), theirs.encode_text(tokenizer(texts), True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": {"rope": "half"}}, "vision.rope 'half'"),
        ({"vision": {"norm_order": "post"}, "text": {"gated": True}}, "vision.norm_order 'post', text.gated True"),
        ({"vision": {"patch_bias": True}}, "vision.patch_bias True"),
        ({"vision": {"conv_stem": True}}, "vision.conv_stem True"),
        ({"vision": {"attention": "local", "attention_options": {"window": 4}}}, "vision.attention 'local'"),
        ({"text": {"norm_eps": 1e-6}}, "text.norm_eps 1e-06"),
        ({"text": {"activation": "relu"}}, "text.activation 'relu'"),
        ({"vision": {"activation": "quick_gelu"}}, "vision.activation 'quick_gelu' beside text.activation 'gelu'"),
    ],
    ids=str,
)
def test_what_open_clip_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export to open_clip: that format cannot express ") as caught:
        to_open_clip(Checkpoint.of("clip", tiny(**changes)), tmp_path)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_preprocessing_that_open_clip_cannot_express_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.of("clip", tiny(), preprocess=PREPROCESS | {"crop_pct": 0.9})
    with pytest.raises(ValueError, match=r"cannot express crop_pct 0\.9 with interpolation bilinear"):
        to_open_clip(checkpoint, tmp_path)


# --------------------------------------------------------------------------------------------------------- bare files


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors"])
def test_a_file_beside_its_config(suffix: str, tmp_path: Path) -> None:
    module = build(quick_gelu=True, vision_cfg={"head_width": 8})
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(module.state_dict(), path)
    else:
        torch.save(module.state_dict(), path)
    (tmp_path / CONFIG).write_text(json.dumps({"model_cfg": model_cfg(quick_gelu=True, vision_cfg={"head_width": 8})}))
    assert_same(load(path).model, module)


def test_a_training_checkpoint_of_open_clips(tmp_path: Path) -> None:
    """As its own trainer writes it: wrapped, and under DDP's prefix."""
    module = build(custom=True, init_logit_bias=-3.0, **openai_cfg())
    state = {f"module.{key}": value for key, value in module.state_dict().items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": state}, tmp_path / "epoch_3.pt")
    with pytest.warns(UserWarning, match=r"does not say which GELU its model has; it is taken as the exact one"):
        loaded = load(tmp_path / "epoch_3.pt")
    assert_same(loaded.model, module)


def test_openais_state_dict(tmp_path: Path) -> None:
    module = build(quick_gelu=True, **openai_cfg())
    state = module.state_dict()
    numbers = {"input_resolution": 16, "context_length": LENGTH, "vocab_size": VOCAB}
    torch.save(state | {name: torch.tensor(value) for name, value in numbers.items()}, tmp_path / "ViT.pt")
    torch.save(state, tmp_path / "vit_b_32-quickgelu-laion400m.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("ViT.pt", "vit_b_32-quickgelu-laion400m.pt"):
            loaded = load(tmp_path / name)
            assert loaded.config["vision"]["activation"] == loaded.config["text"]["activation"] == "quick_gelu"
            assert_same(loaded.model, module)
            assert loaded.preprocess is not None
            assert loaded.preprocess["mean"] == [0.48145466, 0.4578275, 0.40821073]
    assert_same(load(tmp_path / "ViT.pt").model, openai_model(state))


def test_an_export_is_what_openais_code_loads(tmp_path: Path) -> None:
    quick = {"activation": "quick_gelu"}
    ours = randomize(tiny(vision=quick | {"embed_dim": 128}, text=quick | {"embed_dim": 64, "num_heads": 1}))
    to_open_clip(Checkpoint.of("clip", ours), tmp_path)
    state = load_file(tmp_path / "open_clip_model.safetensors")
    assert_same(ours, openai_model(state))


def test_heads_of_published_sizes_are_known(tmp_path: Path) -> None:
    """ViT-H-14's are 80 wide: 64 would do as well, and compute something else."""
    cfg = open_clip.get_model_config("ViT-H-14")
    cfg["vision_cfg"] |= {"mlp_ratio": 1 / 640, "image_size": 28}
    cfg["text_cfg"] |= {"layers": 1, "mlp_ratio": 1 / 512, "vocab_size": 9}
    with torch.device("meta"):
        state = TheirCLIP(**cfg).state_dict()
    from multimodal.pretrained.open_clip import _model_cfg_by_shapes

    assert _model_cfg_by_shapes(state, tmp_path)["vision_cfg"]["head_width"] == 80


def test_openais_archive_is_refused_as_code(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # OpenAI's archives are of 2021
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "ViT-B-32.pt")
    assert "it is a TorchScript archive, which holds code; expected the state_dict" in fails(tmp_path / "ViT-B-32.pt")


def test_files_that_are_no_clip(tmp_path: Path) -> None:
    resnet = TheirCLIP(**model_cfg(vision_cfg={"layers": (1, 1, 1, 1), "width": 8}))
    torch.save(resnet.state_dict(), tmp_path / "RN50-openai.pt")
    found = fails(tmp_path / "RN50-openai.pt")
    assert "without visual.positional_embedding" in found or "visual.conv1.weight" in found
    torch.save({"visual.trunk.x": torch.zeros(1)}, tmp_path / "siglip-openai.pt")
    assert "holds a model without visual.conv1.weight, expected a CLIP of two plain" in fails(
        tmp_path / "siglip-openai.pt"
    )
    state = build(**openai_cfg()).state_dict()
    del state["ln_final.bias"]
    torch.save(state, tmp_path / "short-openai.pt")
    assert "the weights do not fit the model: missing ln_final.bias" in fails(tmp_path / "short-openai.pt")


def test_folders_that_describe_nothing_known(tmp_path: Path) -> None:
    def folder(name: str, described: Any) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(json.dumps(described))
        torch.save({"a": torch.zeros(1)}, tmp_path / name / "open_clip_pytorch_model.bin")
        return tmp_path / name

    timm = {"timm_model_name": "resnet50", "timm_model_pretrained": True}
    cases = {
        folder("timm", {"model_cfg": model_cfg(vision_cfg=timm)}): "its vision_cfg is timm's 'resnet50'",
        folder("hf", {"model_cfg": model_cfg(text_cfg={"hf_model_name": "x/y"})}): "its text_cfg is hf's 'x/y'",
        folder("coca", {"model_cfg": model_cfg(multimodal_cfg={})}): "because it is a CoCa",
        folder("none", {"model_cfg": {"embed_dim": 3}}): "its config has vision_cfg None, expected a table of fields",
        folder("list", {"model_cfg": [1]}): f"{CONFIG} holds no model_cfg and preprocess_cfg",
        folder("what", {"model_cfg": model_cfg(what=1)}): "open_clip cannot build it (TypeError: ",
        folder("keys", {"model_cfg": model_cfg()}): "the weights do not fit the model: missing ",
    }
    for path, message in cases.items():
        found = fails(path)
        assert message in found, found
        assert str(path) in found
    (tmp_path / "keys" / "open_clip_pytorch_model.bin").unlink()
    assert "no weights, expected open_clip_model.safetensors or" in fails(tmp_path / "keys")


# --------------------------------------------------------------------------------------------------------- published


def test_a_published_name_is_fetched_by_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(quick_gelu=True)
    theirs = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "resize_mode": "squash", "interpolation": "bilinear"}
    set_model_preprocess_cfg(module, theirs)
    calls = []

    def fake(name: str, tag: str, force_quick_gelu: bool) -> nn.Module:
        calls.append((name, tag, force_quick_gelu))
        return module

    monkeypatch.setattr(open_clip, "create_model", fake)
    loaded = load("open_clip:ViT-B-32/openai")
    assert calls == [("ViT-B-32", "openai", True)]
    assert loaded.preprocess == PREPROCESS
    assert_same(loaded.model, module)
    read("open_clip:ViT-B-32/laion2b_s34b_b79k")
    assert calls[1:] == [("ViT-B-32", "laion2b_s34b_b79k", False)]


def test_without_a_network_one_line_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **options: Any) -> nn.Module:
        raise OSError("no\nnetwork")

    monkeypatch.setattr(open_clip, "create_model", offline)
    found = fails("open_clip:ViT-B-32/laion2b_s34b_b79k")
    assert "open_clip.create_model('ViT-B-32', 'laion2b_s34b_b79k') failed (OSError: no network); expected a" in found
    monkeypatch.setattr(open_clip, "create_model", lambda *args, **options: pytest.fail("fetched"))
    assert "its image tower is ModifiedResNet" in fails("open_clip:RN50/openai")
    assert "its vision_cfg is timm's 'vit_base_patch16_siglip_224'" in fails("open_clip:ViT-B-16-SigLIP/webli")
    assert "did you mean open_clip:ViT-B-32/laion2b_s34b_b79k?" in fails("open_clip:ViT-B-32/laion2b_s34b_b79")
    assert "open_clip has no such weights" in fails("open_clip:")


def test_a_scale_above_100_is_100() -> None:
    module = build()
    nn.init.constant_(module.logit_scale, math.log(1000))
    images, tokens = batch()
    out = load(module).model(images, tokens)
    assert out.logit_scale.item() == pytest.approx(100)
