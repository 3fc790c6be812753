"""The part of against_trl.py that runs under TRL's own interpreter: knows TRL, and nothing of this project.

PYTHON trl_side.py MODEL TOKENIZER STEPS THREADS        prints {"seconds", "tokens"} of the steps after the warm-up
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARM_UP = 5


class Watch(TrainerCallback):
    """Counts sampled tokens and seconds after the warm-up."""

    def __init__(self) -> None:
        self.tokens = 0
        self.before = 0
        self.started = 0.0
        self.seconds = 0.0

    def reward(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Share of characters that are digits."""
        self.tokens += sum(len(ids) for ids in completion_ids)
        texts = [completion[0]["content"] for completion in completions]
        return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]

    def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
        """Start after the warm-up; read at every later step."""
        if state.global_step == WARM_UP:
            self.started, self.before = time.perf_counter(), self.tokens
        self.seconds = time.perf_counter() - self.started


def main() -> None:
    model, tokenizer, steps, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=64,
            max_steps=WARM_UP + steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            logging_steps=10**6,
            disable_tqdm=True,
        )

        def digits(completions: list[Any], completion_ids: list[list[int]], **others: Any) -> list[float]:
            return watch.reward(completions, completion_ids, **others)

        prompt = [{"role": "user", "content": "guess a number from 1 to 9"}]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=digits,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 4096}),
            processing_class=AutoTokenizer.from_pretrained(tokenizer),
            callbacks=[watch],
        )
        trainer.train()
    print(json.dumps({"seconds": watch.seconds, "tokens": watch.tokens - watch.before}))


if __name__ == "__main__":
    main()
