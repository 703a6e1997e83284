"""A Llama under transformers' Trainer, converted to torchao's Float8 before.

fp8doctor run trainer.py --float8
ACCELERATE_MIXED_PRECISION=fp8 fp8doctor run trainer.py    # overridden by bf16=True: ENV001
fp8doctor run trainer.py --float8 --no-compile             # FP8 Linears that are not compiled: CMP001
ACCELERATE_MIXED_PRECISION=fp8 fp8doctor run trainer.py --no-bf16    # weights that no optimizer holds: MOD007
"""

import argparse

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, count, length, vocabulary):
        self.tokens = torch.randint(0, vocabulary, (count, length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--folder", default="out", help="of the Trainer")
    parser.add_argument("--output", help="file for the trained weights")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 128),
        num_key_value_heads=max(1, arguments.hidden // 512),
        vocab_size=arguments.vocabulary,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable()
    if arguments.float8:
        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
        if not arguments.no_compile:
            for layer in model.model.layers:
                layer.compile()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            arguments.folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.steps,
            learning_rate=1e-4,
            bf16=not arguments.no_bf16,
            full_determinism=arguments.deterministic,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=RandomTokens(arguments.batch * arguments.steps, arguments.length, arguments.vocabulary),
    )
    trainer.train()
    for each in trainer.state.log_history[:-1]:
        print(f"loss {each['loss']:.6f}")
    if arguments.output:
        torch.save(model.state_dict(), arguments.output)


if __name__ == "__main__":
    main()
