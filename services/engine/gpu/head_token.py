"""The launches of the multi-token-prediction block for one or two ids of a sequence: what it begins with, and then two
layers as token.py has them, an attention layer and a mixture of experts.

    x = eh_proj([enorm(embedding of the id) | hnorm(network's state of the token before, behind its final norm)])

Owns its buffers. Rows are consecutive ids of one sequence, of which only the last row's logits are of use.
"""

import torch

from kernels.experts.decode_step import ExpertStep
from kernels.experts.device.turns import Turns
from kernels.linear.gpu import linear
from kernels.norm.gpu import rms_norm
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.token import Replay, Token
from services.engine.gpu.weights import HeadWeights


class HeadToken(Token):
    """`before` float32 [rows, hidden] in octet order: the network's states, without its final norm; the caller fills it
    ahead of each launch."""

    def __init__(
        self,
        head: HeadWeights,
        pool: DevicePool,
        step: ExpertStep,
        turns: Turns,
        context_tokens: int,
        replay: Replay | None = None,
    ) -> None:
        super().__init__(head.network, pool, step, turns, context_tokens, replay=replay)
        config, rows, device = head.network.config, step.tokens, pool.conv.device
        self.head = head
        self.first_attention, self.first_moe = len(config.attention_layers), len(config.moe_layers)
        self.before, self.x, self.normed = (torch.zeros(rows, config.hidden_size, device=device) for _ in range(3))
        self.both = torch.zeros(rows, 2 * config.hidden_size, device=device)

    def _begin(self) -> None:
        super()._begin()
        head = self.head
        embedded, hidden = self.both.view(len(self.both), 8, 2, -1).unbind(2)  # octets of either half
        rms_norm(self.inputs.x, head.enorm.weight, head.enorm.eps, self.normed)
        embedded.copy_(self.normed.view(embedded.shape))
        rms_norm(self.before, head.before.weight, head.before.eps, self.x)
        rms_norm(self.x, head.hnorm.weight, head.hnorm.eps, self.normed)
        hidden.copy_(self.normed.view(hidden.shape))
        linear(self.both, head.eh_proj, self.x, "octets")
