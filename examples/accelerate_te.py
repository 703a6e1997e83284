"""A Llama that Accelerate converts to Transformer Engine's layers. It needs a GPU.

fp8doctor run accelerate_te.py
ACCELERATE_MIXED_PRECISION=fp8 fp8doctor run accelerate_te.py --precision bf16    # overridden: ENV001
fp8doctor run accelerate_te.py --checkpointing    # recomputed outside of the autocast: CKP002
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--output", help="file for the trained weights")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(arguments.deterministic)
    accelerator = Accelerator(
        mixed_precision=arguments.precision,
        kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")] if arguments.precision == "fp8" else [],
    )
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=max(1, arguments.hidden // 512),
        vocab_size=arguments.vocabulary,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, arguments.vocabulary, (arguments.batch * arguments.steps, arguments.length))
    loader = torch.utils.data.DataLoader(tokens, batch_size=arguments.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.6f}")
    if arguments.output:
        weights = accelerator.unwrap_model(model).state_dict()
        kept = {name: each for name, each in weights.items() if not name.endswith("_extra_state")}
        accelerator.save(kept, arguments.output)  # without what Transformer Engine keeps for FP8


if __name__ == "__main__":
    main()
