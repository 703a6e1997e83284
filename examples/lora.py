"""LoRA by PEFT on a Llama whose frozen Linears are in torchao's Float8, every block compiled.

fp8doctor run lora.py
fp8doctor run lora.py --adapters-too    # converted after PEFT, without a filter: SHP002
fp8doctor run lora.py --no-compile      # FP8 Linears that are not compiled: CMP001
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters-too", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--output", help="file for the trained weights")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(arguments.deterministic)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 128),
        num_key_value_heads=max(1, arguments.hidden // 512),
        vocab_size=arguments.vocabulary,
        use_cache=False,
    )
    lora = LoraConfig(r=arguments.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device(device):
        model = LlamaForCausalLM(config).bfloat16()
        if arguments.adapters_too:
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
            convert_to_float8_training(
                model, module_filter_fn=lambda module, name: not name.endswith("lm_head")
            )
        else:
            convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    if not arguments.no_compile:
        for layer in model.base_model.model.model.layers:
            layer.compile()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    model.train()
    for _ in range(arguments.steps):
        tokens = torch.randint(0, arguments.vocabulary, (arguments.batch, arguments.length), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    if arguments.output:
        torch.save([each.detach() for each in trained], arguments.output)


if __name__ == "__main__":
    main()
