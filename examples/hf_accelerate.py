"""Policy-gradient training of a Hugging Face model with accelerate: the patches, and the head that keeps no logits.

    python examples/hf_accelerate.py [--model NAME] [--steps N] [--use-liger]
    accelerate launch examples/hf_accelerate.py --model Qwen/Qwen3-0.6B

Without `--model` it trains a tiny random model. The reward is a toy: sequences drawn once, half of them to be made more
likely, half less likely, as the advantages of GRPO are centred.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import npu_backend

TINY = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face model; default: a tiny random one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--use-liger", action="store_true", help="Liger's kernels instead of our replacements")
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator()
    config = AutoConfig.from_pretrained(options.model) if options.model else TINY

    # Before the model is built: some patches replace classes. The report says what was done, and what was not and why.
    report = npu_backend.apply_npu_fsdp_patches({"hf_config": config, "use_liger": options.use_liger})
    accelerator.print(report)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        model = AutoModelForCausalLM.from_config(config)
    # Before accelerate wraps it: from now on its forward returns log_probs and entropy instead of logits.
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="auto")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if not options.model else 1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(3, config.vocab_size, (8, 32), device=accelerator.device)
    advantages = torch.tensor([1.0, -1.0] * 4, device=accelerator.device)[:, None]

    model.train()
    for step in range(options.steps):
        output = model(input_ids=ids, temperature=1.0, use_cache=False)
        log_probs, entropy = output.log_probs[:, :-1], output.entropy[:, :-1]  # the last token has no successor
        loss = -(advantages * log_probs).mean() - 0.001 * entropy.mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss.item():.4f}  entropy {entropy.mean().item():.4f}")


if __name__ == "__main__":
    main()
