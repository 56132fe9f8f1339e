"""HF BERT layers: post-norm with eps 1e-12, a padded batch."""

import torch
from transformers import BertConfig, BertModel

from multimodal.blocks import Stack, StackConfig
from tests.parity.keys import assert_close, assert_same_gradients, backward_alike, gradients, randomize, to_blocks

TABLE = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_residual.norm",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "mlp_residual.norm",
}


def test_padded_batch() -> None:
    published = BertConfig(
        vocab_size=11, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64
    )
    theirs = randomize(BertModel(published, add_pooling_layer=False))
    config = StackConfig(
        embed_dim=32, depth=3, num_heads=4, mlp_ratio=2, norm_order="post", norm_eps=1e-12, final_norm=False
    )
    ours = Stack(config).eval()
    ours.load_state_dict(to_blocks(theirs.state_dict(), "encoder.layer", TABLE))
    key_mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])

    out = theirs(torch.randint(11, (2, 6)), attention_mask=key_mask.long(), output_hidden_states=True)
    embedded, *layers = out.hidden_states
    actual = ours(embedded.detach(), key_mask=key_mask, need_layers=range(3))
    for mine, expected in zip(actual.layers, layers, strict=True):
        assert_close(mine, expected)
    backward_alike(actual.last, out.last_hidden_state)
    assert_same_gradients(ours, to_blocks(gradients(theirs), "encoder.layer", TABLE))
