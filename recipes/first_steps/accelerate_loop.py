from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from hf_zero import ZeroPlugin

accelerator = Accelerator(gradient_accumulation_steps=2)
ZeroPlugin("zero3.json").attach(accelerator)  # before prepare
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
text = torch.tensor(list(Path(__file__).read_bytes() * 10))  # the bytes of this file, 10 times
rows = torch.utils.data.TensorDataset(text[: 64 * 128].view(-1, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=32)
loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.2f}")
accelerator.save_state("state")  # all ranks call; load_state goes on from it, also on another number of ranks
model.save_pretrained("my-model")  # all ranks call; rank 0 writes
