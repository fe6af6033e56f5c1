"""`FusedLinearForPPO`: the PPO head as the module that verl constructs for every forward and calls by `.forward`."""

from __future__ import annotations

from torch import Tensor, nn

from npu_backend.head import backends, inputs
from npu_backend.head.linear_log_prob import DEFAULT_CHUNK_ROWS, in_chunks


class FusedLinearForPPO(nn.Module):
    """Log-probs and entropy from hidden states and the output embedding's weight. Holds no parameters and no state.

    Args:
        chunk_size: rows per chunk of the torch backend, 512 if not given: more is faster and takes more memory.
        impl_backend: "torch", "triton", "liger" or "auto"; None means "torch".

    Raises:
        ConfigError: (a ValueError) no such backend.
        HeadInputError: `chunk_size` is not a positive integer.

    Examples:
        >>> import torch, npu_backend
        >>> head = npu_backend.FusedLinearForPPO(chunk_size=2)
        >>> log_probs, entropy = head.forward(torch.randn(3, 8), torch.randn(32, 8), torch.tensor([5, 0, 31]))
        >>> log_probs.shape, bool((entropy >= 0).all())
        (torch.Size([3]), True)
    """

    def __init__(self, chunk_size: int = DEFAULT_CHUNK_ROWS, impl_backend: str | None = None) -> None:
        super().__init__()
        backends.check_name(impl_backend)
        inputs.check_count("FusedLinearForPPO: chunk_size", chunk_size)
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor | None = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """(log_probs, entropy), float32, shaped like `input_ids`.

        Args:
            hidden_states: [N, H] or [B, S, H].
            vocab_weights: [V, H].
            input_ids: [N] or [B, S]: the labels, already shifted (verl's name for them).
            temperature: as in `linear_log_prob`.

        Raises:
            HeadInputError: as `linear_log_prob`.
        """
        log_probs, entropy, _ = in_chunks(
            hidden_states,
            vocab_weights,
            input_ids,
            temperature=temperature,
            impl_backend=self.impl_backend,
            chunk_rows=self.chunk_size,
        )
        assert entropy is not None
        return log_probs, entropy
