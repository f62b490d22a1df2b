# pyright: reportMissingImports=false
"""The same GPT-2 in torch, cut where a pipeline cuts it; needs neither JAX nor jaxmorph."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.training_speed.workload import VOCAB_SIZE, Workload

Params = Mapping[str, np.ndarray]


class Embedding(nn.Module):
    """Tokens and their positions to activations."""

    def __init__(self, workload: Workload):
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, workload.width)
        self.position = nn.Embedding(workload.sequence_length, workload.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Activations [microbatch, sequence, width]."""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Attention, then an MLP, each on the normalised residual stream."""

    def __init__(self, workload: Workload):
        super().__init__()
        width = workload.width
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self._num_heads = workload.num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations of the same shape."""
        x = x + self._attend(self.attention_norm(x))
        hidden = functional.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return x + self.contract(hidden)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        microbatch, sequence, width = x.shape
        qkv = self.qkv(x).view(microbatch, sequence, self._num_heads, 3, -1)
        q, k, v = (qkv[:, :, :, i].transpose(1, 2) for i in range(3))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).reshape(microbatch, sequence, width))


class Head(nn.Module):
    """The last normalisation and the output projection."""

    def __init__(self, workload: Workload):
        super().__init__()
        self.norm = nn.LayerNorm(workload.width)
        self.token = nn.Linear(workload.width, VOCAB_SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [microbatch, sequence, vocabulary]."""
        return self.token(self.norm(x))


def make_stage(workload: Workload, params: Params, stage: int, num_stages: int) -> nn.Sequential:
    """A stage with an even share of the layers; of one stage, the whole model.

    Args:
        params: By `write_params`.
    """
    share = workload.num_layers // num_stages
    parts: list[nn.Module] = []
    if stage == 0:
        parts.append(_load(Embedding(workload), _EMBEDDING, params, "embed/"))
    own = range(stage * share, (stage + 1) * share)
    parts += [_load(Block(workload), _BLOCK, params, "layers/", layer) for layer in own]
    if stage == num_stages - 1:
        parts.append(_load(Head(workload), _HEAD, params, "head/"))
    return nn.Sequential(*parts)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a microbatch's tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


_EMBEDDING = {"token.weight": "token", "position.weight": "position"}
_BLOCK = {
    f"{own}.{part}": f"{theirs}/{leaf}"
    for own, theirs, leaves in (
        ("attention_norm", "attention_norm", ("scale", "bias")),
        ("qkv", "attention/qkv", ("kernel", "bias")),
        ("out", "attention/out", ("kernel", "bias")),
        ("mlp_norm", "mlp_norm", ("scale", "bias")),
        ("expand", "expand", ("kernel", "bias")),
        ("contract", "contract", ("kernel", "bias")),
    )
    for part, leaf in zip(("weight", "bias"), leaves, strict=True)
}
_HEAD = {"norm.weight": "norm/scale", "norm.bias": "norm/bias", "token.weight": "token"}


def _load(
    module: nn.Module, names: dict[str, str], params: Params, prefix: str, layer: int | None = None
) -> nn.Module:
    """The module with the parameters of these names; kernels are [inputs, outputs] there."""
    state = {}
    for own, theirs in names.items():
        value = params[prefix + theirs] if layer is None else params[prefix + theirs][layer]
        state[own] = torch.tensor(value.T if theirs.endswith("kernel") else value)
    module.load_state_dict(state)
    return module
