"""accelerate's examples/complete_nlp_example.py without what needs the internet: its data, tokenizer and
metric.

The model is a BERT of the size of the recipe `smoke`, from a configuration; the pairs of sentences are random
token numbers. `start.py` starts it as accelerate's documentation says, and reads from its output when the
first step was done.
"""

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

NUM_PAIRS, TOKENS, BATCH, CLASSES, STEPS = 10_000, 17, 64, 60, 400
CONFIG = BertConfig(
    vocab_size=1000,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=384,
    max_position_embeddings=TOKENS,
    num_labels=CLASSES,
)


def main() -> None:
    """Train; save the state after the second step, and stop, or go on from a state and stop after a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume_from_checkpoint", type=Path)
    given = parser.parse_args()
    accelerator = Accelerator()
    set_seed(42)
    tokens = torch.randint(1, CONFIG.vocab_size, (NUM_PAIRS, TOKENS))
    loader = DataLoader(
        TensorDataset(tokens, torch.randint(CLASSES, (NUM_PAIRS,))), shuffle=True, batch_size=BATCH
    )
    model = BertForSequenceClassification(CONFIG).to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=40, num_training_steps=STEPS
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    active, last = loader, 2
    if given.resume_from_checkpoint:
        accelerator.load_state(given.resume_from_checkpoint)
        active, last = accelerator.skip_first_batches(loader, 2), 1
    model.train()
    for step, (ids, labels) in enumerate(active, 1):
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
        accelerator.backward(outputs.loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {outputs.loss.item():.4f} time {time.time():.3f}", flush=True)
        if step == last:
            break
    if not given.resume_from_checkpoint:
        accelerator.save_state(given.output_dir)


if __name__ == "__main__":
    main()
