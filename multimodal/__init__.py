"""A library of Transformer blocks and the models built from them: pure PyTorch."""
